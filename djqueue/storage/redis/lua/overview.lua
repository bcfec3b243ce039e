-- Read the state of a queue.
--
-- ARGV: 1 the time.
-- Returns {time, counters, numbers of delayed jobs, active jobs, dead letters and all jobs, when the next delayed job is
--   due or '', since when the oldest claimable job has waited or '', overrides and bucket, components of the totals (see
--   `totals_of` in inspector.py)}.
--! include common
--! keys meta jobs st due lease dead w z unhandled


-- Numbers at the front descend, and are below this; see next_number in ready.lua.
local REAR = FRONT + 1
local REAR_PACKED = struct.pack('>I8', REAR)
local PRIORITY_PACKED = struct.pack('>I4', PRIORITY_BASE)
local LINES, PROBES = 500, 64
local earliest

-- Of each priority, the first job that was added at the rear, and the first one added at the front: {number, id}.
local rear, front = {}, {}

local function look(priority, entry)
  local number = unpack_number('>I8', entry)
  local is_front = number < REAR
  local line = is_front and front or rear
  local there = line[priority]
  if not there or is_front and number > there[1] or not is_front and number < there[1] then
    line[priority] = {number, sub(entry, 9)}
  end
end

-- The list has ascending numbers, with holes.
local function entry_from(index, last)
  for at = index, math.min(last, index + PROBES) do
    local entry = call('LINDEX', W, at)
    if entry ~= '' then return entry, at end
  end
end

local function look_at_list(length)
  local first = entry_from(0, length - 1)
  if not first then return end
  if unpack_number('>I8', first) >= REAR then return look(PRIORITY_PACKED, first) end
  local low, high = 0, length - 1
  while low < high do
    local middle = floor((low + high) / 2)
    local entry = entry_from(middle, high)
    if entry and unpack_number('>I8', entry) < REAR then low = middle + 1 else high = middle end
  end
  for at = math.max(0, low - PROBES), math.min(length - 1, low + PROBES) do
    local entry = call('LINDEX', W, at)
    if entry ~= '' then look(PRIORITY_PACKED, entry) end
  end
end

-- The sorted sets have a section for each priority, or for each name and priority.
local function look_at_lines(key, named)
  local after = '-'
  for _ = 1, LINES do
    local found = call('ZRANGEBYLEX', key, after, '+', 'LIMIT', 0, 1)[1]
    if not found then return end
    local at = named and string.find(found, '%z', 2) or 0
    local line = sub(found, 1, at + 4)
    local last = '(' .. line .. '\255'
    local firsts = {
      call('ZRANGEBYLEX', key, '[' .. line .. REAR_PACKED, last, 'LIMIT', 0, 1)[1] or false,
      call('ZREVRANGEBYLEX', key, '(' .. line .. REAR_PACKED, '[' .. line, 'LIMIT', 0, 1)[1] or false,
    }
    for i = 1, 2 do
      if firsts[i] then look(sub(line, at + 1), sub(firsts[i], at + 5)) end
    end
    after = last
  end
end

local length = call('LLEN', W)
if length > 0 then look_at_list(length) end
if call('EXISTS', Z) == 1 then look_at_lines(Z, false) end
if call('EXISTS', UNHANDLED) == 1 then look_at_lines(UNHANDLED, true) end
for _, lines in ipairs({rear, front}) do
  for _, found in pairs(lines) do
    local blob, st = call('HGET', JOBS, found[2]), call('HGET', ST, found[2])
    if blob then
      local run_at = st and cmsgpack.unpack(sub(st, 10))[6] or 0
      local since = math.max(unpack_number('>I8', blob, 9), run_at)
      if not earliest or since < earliest then earliest = since end
    end
  end
end

-- Groups that pause until their rate allows more are in `due`, too.
local due = ''
local resting = tonumber(call('HGET', META, 'r') or 0)
local soonest = call('ZRANGE', DUE, 0, resting, 'WITHSCORES')
for i = 1, #soonest, 2 do
  if sub(soonest[i], 1, 1) ~= NUL then
    due = soonest[i + 1]
    break
  end
end
return {
  string.format('%.0f', now), call('HGETALL', META), call('ZCARD', DUE), call('ZCARD', LEASE), call('ZCARD', DEAD),
  call('HLEN', JOBS), due, earliest and string.format('%.0f', earliest) or '',
  call('HMGET', META, 'paused', 'mode', 'limited', 'capacity', 'per', 'concurrency', 'bucket', 'parts', 'filled', 'holds'),
  call('HMGET', META, 'gone', 'gone:c', 'gone:x', 'retried', 'stalled', 'otherwise', 'buried'),
}
