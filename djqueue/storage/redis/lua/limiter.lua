-- Permits of a limiter that queues share: what has come of earlier ones, and then a request for more.
--
-- Arguments: the rate that the settings set (capacity, per) and the concurrency ('' each for none); what is told
-- (MessagePack), see below; the queue that asks ('' for none: the answer is how the limiter stands), the name of its
-- request, for how many jobs at most, the permits without which none will do, for how long the permits are held, and
-- 's' if the queue has had something, or 'f' if it had its turn and could not use what it got.
-- Told are three lists: requests that were used, each with its jobs that did not start, whether its queue has no more,
-- that queue, for how long, and the names and weights of permits; then names, the time first, that last longer from now
-- on; and names that are over.
-- Answers for how many jobs there is room, the permits they have and those that are held, the concurrency, milliseconds
-- until the clock may bring more (-1 for none, twice), and queues that are to be woken. How it stands is: the rate
-- (capacity, per), the concurrency, the permits that are taken, whole tokens (-1: there is no such limit), the line,
-- milliseconds until there is a token, and queues that are to be woken.
--
-- permits  name by the time at which a permit is lost: of a claim (see `limits.permit`), or '?' and that of a request
-- weights  name: permits that it stands for, if not one; '': what all come to above one for each
-- bucket   the rate, parts of tokens, when they were counted      said    limits set while queues ran
-- line     queues that were refused, in order: name, permits that it needs (0: it is only to be woken), until when they
--          are kept for it (0: it was not woken yet)
--! include base
-- over     names that were over before they were told to be used: two threads of a process overtook one another
--! keys permits weights bucket line said over

local TURN = 250
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

local capacity, per, most
do
  local said = call('HMGET', SAID, 'limited', 'capacity', 'per', 'concurrency')
  if said[1] then
    capacity, per, most = tonumber(said[2]), tonumber(said[3]), tonumber(said[4])
  else
    capacity, per, most = tonumber(ARGV[ARGS]), tonumber(ARGV[ARGS + 1]), tonumber(ARGV[ARGS + 2])
  end
end
local told, queue = decode(ARGV[ARGS + 3]), ARGV[ARGS + 4]
local kept = call('GET', LINE)
local line = kept and decode(kept) or {}

local function leave(name)
  for i, turn in ipairs(line) do
    if turn[1] == name then return table.remove(line, i) end
  end
end

-- What was told.

for _, name in ipairs(call('ZRANGEBYSCORE', PERMITS, '-inf', now, 'LIMIT', 0, 1000)) do drop(name) end
local unused = 0
for _, one in ipairs(told[1]) do
  local request, idle, is_over, asker, lasts = unpack(one, 1, 5)
  if drop('?' .. request) > 0 then unused = unused + idle end
  for i = 6, #one, 2 do hold(one[i], one[i + 1], lasts) end
  if is_over then leave(asker) end
end
for _, names in ipairs(told[2]) do
  for i = 2, #names do call('ZADD', PERMITS, 'XX', now + names[1], names[i]) end
  longest = math.max(longest, names[1])
end
for _, name in ipairs(told[3]) do
  local weight = drop(name)
  gone = gone + weight
  if weight == 0 then
    call('SADD', OVER, name)
    call('PEXPIRE', OVER, 60000)
  end
end

-- What there is. Of tokens there are parts, `per` to a token, of which a millisecond brings `capacity`.

local parts
if capacity then
  local had = call('HMGET', BUCKET, 'rate', 'parts', 'filled')
  parts = capacity * per
  if had[1] == capacity .. '/' .. per then
    parts = math.min(parts, tonumber(had[2]) + math.max(0, now - tonumber(had[3])) * capacity + unused * per)
  end
end
local function used()
  return call('ZCARD', PERMITS) + (call('HGET', WEIGHTS, '') or 0)
end
local function needed(weight)
  return most and math.min(weight, most) or weight
end

-- What those in line before a queue leave to it, of tokens and permits; they are woken, unless what they wait for is
-- still held by the request.
local woken_queues = {}
local function left_for(name, held)
  local tokens, free = parts and floor(parts / per) or UNBOUNDED, most and most - used() or UNBOUNDED
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
      return tokens, 0 -- else those who need less would never let it have as much
    elseif need == 0 and at_once > 0 then
      woken_queues[#woken_queues + 1] = turn[1]
      table.remove(line, i)
    else
      if turn[3] == 0 and need > 0 and need <= at_once then
        woken_queues[#woken_queues + 1] = turn[1]
        turn[3] = now + TURN
      end
      if need > 0 then tokens = tokens - 1 end
      free, at_once, i = free - need, at_once - need, i + 1
    end
  end
  return tokens, free
end

-- The request. What it gave back it holds until its claim is made: till then the jobs that have ended are active.

local starts, permits, held, wait = 0, 0, 0, -1
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
  if starts < wanted then
    local is_served = starts > 0 or ARGV[ARGS + 9] == 's'
    local place
    for i, turn in ipairs(line) do
      if turn[1] == queue then place = i end
    end
    local keeps_place = place and not is_served and line[place][2] > 0
    if place then table.remove(line, place) end
    if ARGV[ARGS + 9] == 'f' then place = 1 elseif not keeps_place then place = #line + 1 end
    table.insert(line, place, {queue, is_served and 0 or least, 0})
    local function may_come(at)
      local left = math.max(1, at - now)
      if wait < 0 or left < wait then wait = left end
    end
    for _, turn in ipairs(line) do
      if turn[3] > now then may_come(turn[3]) end
    end
    if held > permits and #line > 1 then may_come(now + TURN) end -- of those that are woken when it is free
    local missing = parts and per - (parts - starts * per) or 0
    if missing > 0 then may_come(now + math.ceil(missing / capacity)) end
    local first = most and call('ZRANGE', PERMITS, 0, 0, 'WITHSCORES') or {}
    if first[2] then may_come(tonumber(first[2])) end
  else
    leave(queue)
  end
end

-- What is kept.

if parts and (starts > 0 or unused > 0) then
  parts = parts - starts * per
  local number = string.format
  call('HSET', BUCKET, 'rate', capacity .. '/' .. per, 'parts', number('%.17g', parts), 'filled', number('%.0f', now))
  -- Longer than it takes to be full, which it is when it is gone.
  call('PEXPIRE', BUCKET, number('%.0f', math.ceil((capacity * per - parts) / capacity) + 60000))
end
if #line > 0 then
  call('SET', LINE, encode(line), 'PX', 60000)
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
  return answer({capacity or -1, per or -1, most or -1, used(), tokens, waiting, soon, woken_queues})
end
unchanged = true
return answer({starts, permits, held, most or -1, wait, woken_queues})
