-- Grant permits of a limiter that queues share, or describe the limiter.
--
-- ARGV: the configured rate (capacity, per) and concurrency (each '' for none); reports (MessagePack); the queue that
--   asks ('' only describes the limiter), the name of its request, the number of jobs wanted, the weight of the first
--   one, milliseconds for which the permits are held, and 's' if the queue has been served, or its place in line if it
--   could not use what it was granted.
-- The reports are three lists: finished requests (name, number of jobs that did not start, whether the queue has no
--   more jobs, the queue, duration of its permits, then name and weight of each); renewals (duration, then names); names
--   of permits that are returned.
-- Returns the number of jobs that may start, their permits, the permits held, the concurrency, milliseconds until more
--   may be available (-1: unknown), the place that the queue had in line, and the queues to wake. The description is the
--   rate (capacity, per), the concurrency, permits in use, whole tokens (each -1 for none), the queues in line,
--   milliseconds until the next token, and the queues to wake.
--
-- permits    names by the time at which a permit expires: of a claim (see `limits.permit`), or '?' .. name of a request
-- weights    name: its permits if they are not one; '': the sum of what is above one
-- bucket     the rate, parts of tokens, and when these were counted
-- overrides  limits set at run time
-- line       queues that were refused, in order: name, permits that it needs (0: it only has to be woken), until when
--            these are reserved for it (0: it was not woken yet)
-- over       names that were returned before they were reported: two threads of a process overtook each other
--! include base rates
--! keys permits weights bucket line overrides over

local RESERVED = 250 -- milliseconds
local UNBOUNDED = 2 ^ 52
local gone, longest = 0, 0

local function drop(name)
  if call('ZREM', PERMITS, name) == 0 then return 0 end
  local weight = tonumber(call('HGET', WEIGHTS, name) or 1)
  if weight ~= 1 then
    call('HDEL', WEIGHTS, name)
    if call('HINCRBY', WEIGHTS, '', 1 - weight) == 0 then call('HDEL', WEIGHTS, '') end
  end
  return weight
end

local overtaken = call('EXISTS', OVER) == 1
local function hold(name, weight, lasts)
  if overtaken and call('SREM', OVER, name) == 1 then return end
  drop(name)
  call('ZADD', PERMITS, now + lasts, name)
  if weight ~= 1 then
    call('HSET', WEIGHTS, name, weight)
    call('HINCRBY', WEIGHTS, '', weight - 1)
  end
  longest = math.max(longest, lasts)
end

local overrides = call('HMGET', OVERRIDES, 'limited', 'capacity', 'per', 'concurrency')
local capacity, per, concurrency = limits_of(overrides, ARGV[ARGS], ARGV[ARGS + 1], ARGV[ARGS + 2])
local reports, queue = decode(ARGV[ARGS + 3]), ARGV[ARGS + 4]
local kept = call('GET', LINE)
local line = kept and decode(kept) or {}

local function leave(name)
  for i, turn in ipairs(line) do
    if turn[1] == name then return table.remove(line, i) end
  end
end

-- Apply the reports.

for _, name in ipairs(call('ZRANGEBYSCORE', PERMITS, '-inf', now, 'LIMIT', 0, 1000)) do drop(name) end
local unused = 0
for _, one in ipairs(reports[1]) do
  local request, idle, is_over, asker, lasts = unpack(one, 1, 5)
  if drop('?' .. request) > 0 then unused = unused + idle end
  for i = 6, #one, 2 do hold(one[i], one[i + 1], lasts) end
  if is_over then leave(asker) end
end
for _, names in ipairs(reports[2]) do
  for i = 2, #names do call('ZADD', PERMITS, 'XX', now + names[1], names[i]) end
  longest = math.max(longest, names[1])
end
for _, name in ipairs(reports[3]) do
  local weight = drop(name)
  gone = gone + weight
  if weight == 0 then
    call('SADD', OVER, name)
    call('PEXPIRE', OVER, MINUTE)
  end
end

-- Count what is available.

local parts
if capacity then
  local bucket = call('HMGET', BUCKET, 'rate', 'parts', 'filled')
  parts = parts_of(capacity, per, bucket[1], bucket[2], bucket[3], unused * per)
end
local function used()
  return call('ZCARD', PERMITS) + (call('HGET', WEIGHTS, '') or 0)
end
local function needed(weight)
  return concurrency and math.min(weight, concurrency) or weight
end

-- Return the tokens and permits that the queues in line leave to another one. Those are woken, unless what they wait for
-- is still held by the request.
local woken_queues = {}
local function left_for(name, held)
  local tokens, free = parts and floor(parts / per) or UNBOUNDED, concurrency and concurrency - used() or UNBOUNDED
  local at_once, i = free - held, 1
  while i <= #line and tokens > 0 and free > 0 do
    local turn = line[i]
    local need = needed(turn[2])
    if turn[1] == name then
      if need > 0 then break end
      i = i + 1
    elseif turn[3] > 0 and turn[3] <= now then
      table.remove(line, i)
    elseif need > free then
      return tokens, 0 -- otherwise those that need less would always go first
    elseif need == 0 and at_once > 0 then
      woken_queues[#woken_queues + 1] = turn[1]
      table.remove(line, i)
    else
      if turn[3] == 0 and need > 0 and need <= at_once then
        woken_queues[#woken_queues + 1] = turn[1]
        turn[3] = now + RESERVED
      end
      if need > 0 then tokens = tokens - 1 end
      free, at_once, i = free - need, at_once - need, i + 1
    end
  end
  return tokens, free
end

-- Serve the request. It holds what it returned until its claim is made: its ended jobs count as active until then.

local starts, permits, held, wait, place = 0, 0, 0, -1, 0
if queue == '' then
  left_for(false, 0)
else
  local request, wanted, least, lasts = ARGV[ARGS + 5], tonumber(ARGV[ARGS + 6]), tonumber(ARGV[ARGS + 7]), tonumber(ARGV[ARGS + 8])
  local tokens, free = left_for(queue, gone)
  if free >= needed(least) then permits = math.min(free, math.max(wanted, least)) end
  starts = math.max(0, math.min(wanted, tokens, permits))
  if starts == 0 then permits = 0 elseif least == 1 then permits = starts end
  held = math.max(permits, gone)
  if held > 0 then hold('?' .. request, held, lasts) end
  place = #line + 1
  for i, turn in ipairs(line) do
    if turn[1] == queue and turn[2] > 0 then place = i end
  end
  if starts < wanted then
    local is_served = starts > 0 or ARGV[ARGS + 9] == 's'
    leave(queue)
    -- A queue whose first job needs more than it was granted has used no turn: it gets its place back.
    local index = is_served and #line + 1 or tonumber(ARGV[ARGS + 9]) or place
    table.insert(line, math.min(index, #line + 1), {queue, is_served and 0 or least, 0})
    local function may_come(at)
      local left = math.max(1, at - now)
      if wait < 0 or left < wait then wait = left end
    end
    for _, turn in ipairs(line) do
      if turn[3] > now then may_come(turn[3]) end
    end
    if held > permits and #line > 1 then may_come(now + RESERVED) end -- those that are woken then go first
    local missing = parts and per - (parts - starts * per) or 0
    if missing > 0 then may_come(now + math.ceil(missing / capacity)) end
    local first = concurrency and call('ZRANGE', PERMITS, 0, 0, 'WITHSCORES') or {}
    if first[2] then may_come(tonumber(first[2])) end
  else
    leave(queue)
  end
end

-- Store the changes.

if parts and (starts > 0 or unused > 0) then
  parts = parts - starts * per
  store_bucket(BUCKET, 'rate', capacity, per, parts)
  -- A bucket that is gone is full: it has to last until then.
  call('PEXPIRE', BUCKET, string.format('%.0f', math.ceil((capacity * per - parts) / capacity) + MINUTE))
end
if #line > 0 then
  call('SET', LINE, encode(line), 'PX', MINUTE)
elseif kept then
  call('DEL', LINE)
end
if longest > 0 then
  for _, key in ipairs({PERMITS, WEIGHTS}) do
    if call('PTTL', key) < longest then call('PEXPIRE', key, longest) end
  end
end
if queue == '' then
  local waiting = {}
  for i, turn in ipairs(line) do waiting[i] = turn[1] end
  local tokens = parts and floor(parts / per) or -1
  local missing = parts and math.max(0, per - parts) or 0
  local soon = missing > 0 and math.ceil(missing / capacity) or 0
  unchanged = true
  return answer({capacity or -1, per or -1, concurrency or -1, used(), tokens, waiting, soon, woken_queues})
end
unchanged = true
return answer({starts, permits, held, concurrency or -1, wait, place, woken_queues})
