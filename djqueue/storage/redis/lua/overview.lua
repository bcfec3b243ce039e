-- Read the state of a queue.
--
-- ARGV: 1 the time.
-- Returns {time, counters, numbers of delayed jobs, active jobs, dead letters and all jobs, when the next delayed job is
--   due or '', since when the oldest claimable job that is not held has waited or '', overrides and bucket, components of
--   the totals (see `_totals` in reads.py)}.
--! include common layout
--! keys meta jobs st due lease dead w z unhandled


-- Numbers at the front descend, and are below this; see next_number in ready.lua.
local REAR = FRONT + 1
local REAR_PACKED = struct.pack('>I8', REAR)
local PRIORITY_PACKED = struct.pack('>I4', PRIORITY_BASE)
-- PASSED: how many jobs that may be held are looked at. Claims move those that they pass to `unhandled`, by name.
local LINES, PROBES, PASSED = 500, 64, 1000
local earliest

local held -- names; nil: none
for _, hold in ipairs(cmsgpack.unpack(call('HGET', META, 'holds') or '\144')) do
  if hold[3] == 0 or hold[3] > now then
    held = held or {}
    held[hold[1]] = true
  end
end

local function is_held(id)
  local blob = held and call('HGET', JOBS, id)
  return blob and held[name_of(blob)]
end

-- Of each priority, the first job that was added at the rear, and the first one added at the front: {number, id}.
local rear, front = {}, {}

local function look(priority, entry)
  local number = unpack_number('>I8', entry)
  local is_front = number < REAR
  local line = is_front and front or rear
  local there, id = line[priority], sub(entry, 9)
  local is_first = not there or is_front and number > there[1] or not is_front and number < there[1]
  if is_first and not is_held(id) then line[priority] = {number, id} end
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
  local low, high, probes = 0, length - 1, held and PASSED or PROBES
  if unpack_number('>I8', first) >= REAR then
    if not is_held(sub(first, 9)) then return look(PRIORITY_PACKED, first) end
    high = 0
  end
  while low < high do
    local middle = floor((low + high) / 2)
    local entry = entry_from(middle, high)
    if entry and unpack_number('>I8', entry) < REAR then low = middle + 1 else high = middle end
  end
  for _, entry in ipairs(call('LRANGE', W, math.max(0, low - probes), low + probes)) do
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
    if held and named and held[string.match(found, '^%z?([^%z]*)')] then
      after = '[' .. sub(found, 1, at - 1) .. AFTER
    else
      local line, most = sub(found, 1, at + 4), held and not named and PASSED or 1
      local last = '(' .. line .. '\255'
      for _, entries in ipairs({
        call('ZRANGEBYLEX', key, '[' .. line .. REAR_PACKED, last, 'LIMIT', 0, most),
        call('ZREVRANGEBYLEX', key, '(' .. line .. REAR_PACKED, '[' .. line, 'LIMIT', 0, most),
      }) do
        for _, entry in ipairs(entries) do look(sub(line, at + 1), sub(entry, at + 5)) end
      end
      after = last
    end
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
