-- Remove completed and cancelled jobs, many at a time: expired ones, or those above a bound of one outcome. Jobs with a
-- dead letter or with items are left to remove.lua.
--
-- KEYS: of each job, its result and its log lines.
-- ARGV: '' for expired jobs or the outcome's state code, maximum number of these, maximum bytes of these ('' each for
--   none); then the ids.
-- Returns the number of removed jobs.
--! include base layout
--! keys finished hist prog sizes results details about

local ids, gone, counts = {}, {}, {c = 0, x = 0}
local wanted, limit, bytes = ARGV[ARGS], tonumber(ARGV[ARGS + 1]), tonumber(ARGV[ARGS + 2])
local first_id = ARGS + 3
local sts = call('HMGET', ST, unpack(ARGV, first_id))

local sizes = call('EXISTS', SIZES) == 1 and call('HMGET', SIZES, unpack(ARGV, first_id)) or {}
local freed = {c = 0, x = 0, r = 0}

local function counted(field)
  return tonumber(call('HGET', META, field) or 0)
end
local surplus = limit and counted(wanted) - counted('h' .. wanted) - limit or 0
local excess = bytes and counted('B' .. wanted) + (wanted == 'c' and counted('Br') or 0) - bytes or 0

-- A body of twelve values has no items, one of fourteen (0x9e) may have: see job.lua.
local function has_items(st)
  local first = string.byte(st, 26)
  return first ~= 0x9c and (first ~= 0x9e or decode(sub(st, 26))[13] ~= false)
end

local function may_go(id, st, code)
  if has_items(st) then return false end
  local expires = unpack_number('>I8', st, 18)
  if wanted == '' then return expires ~= 0 and expires <= now end
  if code ~= wanted or surplus <= 0 and excess <= 0 then return false end
  -- A held record does not expire, and has a score below those that are kept forever.
  return expires ~= 0 or tonumber(call('ZSCORE', FINISHED, id) or 0) >= FOREVER
end

for i = 1, #sts do
  local st, id = sts[i], ARGV[first_id + i - 1]
  local code = st and sub(st, 1, 1)
  if counts[code or ''] and may_go(id, st, code) then
    surplus = surplus - 1
    if sizes[i] then
      local size, result = unpack_number('>I4I4', sizes[i])
      freed[code], freed.r = freed[code] + size, freed.r + result
      excess = excess - size - result
    end
    counts[code] = counts[code] + 1
    ids[#ids + 1] = id
    gone[#gone + 1], gone[#gone + 2] = KEYS[FIXED + 2 * i - 1], KEYS[FIXED + 2 * i]
    note(id, 'r')
    if watching then
      local blob = call('HGET', JOBS, id)
      emit_event(id, name_of(blob), 'removed', NAMES[code])
    end
  end
end
if #ids > 0 then
  if call('EXISTS', ABOUT) == 1 then
    local entries = {}
    for i, blob in ipairs(call('HMGET', JOBS, unpack(ids))) do
      local subject = decode(sub(blob, options_range(blob))).subject
      if subject then entries[#entries + 1] = subject .. NUL .. sub(blob, 9, 16) .. sub(blob, 1, 8) .. ids[i] end
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
  for first = 1, #gone, CHUNK do
    call('UNLINK', unpack(gone, first, math.min(first + CHUNK - 1, #gone)))
  end
  add('c', -counts.c)
  add('x', -counts.x)
  for code, number in pairs(counts) do
    if number > 0 then call('HINCRBY', META, 'gone:' .. code, number) end
  end
end
return answer(#ids)
