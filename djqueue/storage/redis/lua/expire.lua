-- Forget completed and cancelled jobs, many at a time: those whose records' time is over, or some of one outcome that
-- the queue keeps too many of; see `remove` for the others, which have a letter or items.
-- Arguments: '', or the outcome's letter; how many of that are kept, and how many bytes of them ('' each: as many as there
-- are); then the ids. Keys: of each its result and its log lines.
--! include base
--! keys finished hist prog sizes results details about

local ids, gone, counts = {}, {}, {c = 0, x = 0}
local wanted, most, bytes = ARGV[ARGS], tonumber(ARGV[ARGS + 1]), tonumber(ARGV[ARGS + 2])
local first_id = ARGS + 3
local sts = call('HMGET', ST, unpack(ARGV, first_id))

local sizes = call('EXISTS', SIZES) == 1 and call('HMGET', SIZES, unpack(ARGV, first_id)) or {}
local freed = {c = 0, x = 0, r = 0}

local function counted(field)
  return tonumber(call('HGET', COUNT, field) or 0)
end
local surplus = most and counted(wanted) - counted('h' .. wanted) - most or 0
local excess = bytes and counted('B' .. wanted) + (wanted == 'c' and counted('Br') or 0) - bytes or 0

-- See `job`: a body of twelve has no items, one of fourteen (0x9e) may have.
local function has_items(st)
  local first = byte(st, 26)
  return first ~= 0x9c and (first ~= 0x9e or decode(sub(st, 26))[13] ~= false)
end

local FOREVER = 4503599627370496
local function may_go(id, st, letter)
  if has_items(st) then return false end
  local expires = unpack_number('>I8', st, 18)
  if wanted == '' then return expires ~= 0 and expires <= now end
  if letter ~= wanted or surplus <= 0 and excess <= 0 then return false end
  -- One that is held for others has no end, and a place before those that are kept for ever.
  return expires ~= 0 or tonumber(call('ZSCORE', FINISHED, id) or 0) >= FOREVER
end

for i = 1, #sts do
  local st, id = sts[i], ARGV[first_id + i - 1]
  local letter = st and sub(st, 1, 1)
  if counts[letter or ''] and may_go(id, st, letter) then
    surplus = surplus - 1
    if sizes[i] then
      local size, result = unpack_number('>I4I4', sizes[i])
      freed[letter], freed.r = freed[letter] + size, freed.r + result
      excess = excess - size - result
    end
    counts[letter] = counts[letter] + 1
    ids[#ids + 1] = id
    gone[#gone + 1], gone[#gone + 2] = KEYS[FIXED + 2 * i - 1], KEYS[FIXED + 2 * i]
    note(id, 'r')
    if watching then
      local blob = call('HGET', JOBS, id)
      local name = sub(blob, 20, 19 + unpack_number('>I2', blob, 18))
      tell(id, name, 'removed', letter == 'c' and 'completed' or 'cancelled')
    end
  end
end
if #ids > 0 then
  if call('EXISTS', ABOUT) == 1 then
    local entries = {}
    for i, blob in ipairs(call('HMGET', JOBS, unpack(ids))) do
      local at = 20 + unpack_number('>I2', blob, 18)
      local subject = decode(sub(blob, at + 4, at + 3 + unpack_number('>I4', blob, at))).subject
      if subject then entries[#entries + 1] = subject .. '\0' .. sub(blob, 9, 16) .. sub(blob, 1, 8) .. ids[i] end
    end
    variadic('ZREM', ABOUT, entries)
  end
  variadic('HDEL', JOBS, ids)
  variadic('HDEL', ST, ids)
  variadic('ZREM', FINISHED, ids)
  if call('EXISTS', HIST) == 1 then variadic('HDEL', HIST, ids) end
  if call('EXISTS', PROG) == 1 then variadic('HDEL', PROG, ids) end
  if #sizes > 0 then
    variadic('HDEL', SIZES, ids)
    variadic('ZREM', RESULTS, ids)
    add('Bc', -freed.c)
    add('Bx', -freed.x)
    add('Br', -freed.r)
  end
  if call('EXISTS', DETAILS) == 1 then
    for _, id in ipairs(ids) do call('ZREM', DETAILS, 'h' .. id, 'l' .. id) end
  end
  for first = 1, #gone, 4000 do
    call('UNLINK', unpack(gone, first, math.min(first + 3999, #gone)))
  end
  add('c', -counts.c)
  add('x', -counts.x)
  for letter, number in pairs(counts) do
    if number > 0 then call('HINCRBY', META, 'gone:' .. letter, number) end
  end
end
return answer(#ids)
