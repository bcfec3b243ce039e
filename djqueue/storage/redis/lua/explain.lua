-- What is known of a job that may keep it waiting, at one moment.
--
-- Arguments: the id, the group limit, how many jobs before it are counted at most, how many active ones are named.
-- Answers the time and, if it is there: its record and state; what the queue was told and its rate has left; the slots
-- that are taken; when its lease ends; the first active jobs, each with its state; of its group: what was said to it and
-- to all, how many are active, until when it rests, and the first of these; the jobs before it, or -1; what it waits for; and the id of the
-- active job with its unique key that it follows, or ''.
--! keys jobs st meta count w z asides due parks heads out groups unmet lease uniq

local call, sub = redis.call, string.sub
local pack, unpack_number = struct.pack, struct.unpack
local time = call('TIME')
local clock = time[1] * 1000 + math.floor(time[2] / 1000)
local now = string.format('%.0f', tonumber(ARGV[1]) or clock)
local id, group_limit, most, shown = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local NUL, AFTER = string.char(0), string.char(1)
local FLIP, PROBES, LINES, LOOKED_AT = 2147483648, 64, 500, 1000

local blob, st = call('HGET', JOBS, id), call('HGET', ST, id)
if not blob then return {now} end
local length = unpack_number('>I2', blob, 18)
local size = unpack_number('>I4', blob, 20 + length)
local o = cmsgpack.unpack(sub(blob, 24 + length, 23 + length + size))
local letter, mark = st and sub(st, 1, 1) or 'w', st and sub(st, 2, 9) or sub(blob, 1, 8)
local group = group_limit > 0 and o.group

-- Entries of the list whose number is lower: they ascend, with holes.
local function before_in_list(number)
  local low, high = 0, call('LLEN', W)
  while low < high do
    local middle = math.floor((low + high) / 2)
    local at, entry = middle, call('LINDEX', W, middle)
    while entry == '' and at < high - 1 and at - middle < PROBES do
      at = at + 1
      entry = call('LINDEX', W, at)
    end
    if entry and entry ~= '' and unpack_number('>I8', entry) < number then low = at + 1 else high = middle end
  end
  if low > 2 * most then return most end
  local count = 0
  if low > 0 then
    for _, entry in ipairs(call('LRANGE', W, 0, low - 1)) do
      if entry ~= '' then count = count + 1 end
    end
  end
  return count
end

local function before()
  if letter == 'g' then
    local first, entry = '[' .. group .. NUL, '(' .. group .. NUL .. mark .. id
    return call('ZLEXCOUNT', HEADS, first, '(' .. group .. AFTER) + call('ZLEXCOUNT', PARKS, first, entry)
  end
  if letter ~= 'w' and letter ~= 's' then return -1 end
  local priority, number = o.priority or 0, unpack_number('>I8', mark)
  local place = pack('>I4', FLIP - priority) .. mark
  local count = call('ZLEXCOUNT', Z, '-', '(' .. place)
  if priority < 0 then
    count = count + call('LLEN', W) - tonumber(call('HGET', META, 'holes') or 0)
  elseif priority == 0 then
    count = count + before_in_list(number)
  end
  local after = '-'
  for _ = 1, LINES do
    local found = call('ZRANGEBYLEX', ASIDES, after, '+', 'LIMIT', 0, 1)[1]
    if not found then break end
    -- A name's jobs with a stalled attempt are a line of their own, which begins with NUL.
    local line = sub(found, 1, string.find(found, '%z', 2))
    count = count + call('ZLEXCOUNT', ASIDES, '[' .. line, '(' .. line .. place)
    after = '(' .. sub(line, 1, -2) .. AFTER
  end
  return math.min(most, count)
end

local holders = {}
for _, one in ipairs(call('ZRANGE', LEASE, 0, shown - 1)) do
  holders[#holders + 1] = one
  holders[#holders + 1] = call('HGET', ST, one) or ''
end

local mates, said, out = {}, {}, 0
if group then
  said = call('HMGET', GROUPS, group, '')
  out = tonumber(call('HGET', OUT, group) or 0)
  local others = out > 0 and call('ZRANGE', LEASE, 0, LOOKED_AT - 1) or {}
  for _, one in ipairs(others) do
    local other = call('HGET', JOBS, one)
    if other then
      local at = 20 + unpack_number('>I2', other, 18)
      if cmsgpack.unpack(sub(other, at + 4, at + 3 + unpack_number('>I4', other, at))).group == group then
        mates[#mates + 1] = one
        mates[#mates + 1] = call('HGET', ST, one) or ''
      end
    end
    if #mates >= 2 * shown then break end
  end
end

local unmet, followed = {}, ''
for _, entry in ipairs(call('ZRANGEBYLEX', UNMET, '[' .. id .. NUL, '(' .. id .. AFTER, 'LIMIT', 0, LOOKED_AT)) do
  local rest = sub(entry, #id + 2)
  local at = string.find(rest, '%z')
  if at > 1 then
    unmet[#unmet + 1] = sub(rest, 1, at - 1)
    unmet[#unmet + 1] = sub(rest, at + 1)
  else
    local held = o.unique_key and call('HGET', UNIQ, o.unique_key)
    followed = held and sub(held, 17) or ''
  end
end

return {
  now, blob, st or '',
  call('HMGET', META, 'paused', 'limited', 'capacity', 'per', 'concurrency', 'bucket', 'parts', 'filled'),
  call('ZCARD', LEASE) + (call('HGET', COUNT, 'e') or 0), call('ZSCORE', LEASE, id) or '',
  holders, {said[1] or '', said[2] or '', out, group and call('ZSCORE', DUE, NUL .. group) or ''}, mates, before(), unmet, followed,
}
