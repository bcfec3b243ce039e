-- The workers. Arguments: a verb, and
--   seen   id, what it says of itself, when it started: answers the commands that wait for it, which are forgotten
--   gone   id
--   list   the milliseconds after which a silent one counts as gone, and after which a dump is over: answers what the
--          workers said, each with the time
--   steer  id, a command, those milliseconds: answers what becomes of the command
--   dump   id, a text: answers 1 if it is kept
--   dumped id, the milliseconds after which a dump is over: answers its time and text, or nothing
-- Commands wait as MessagePack: the start of the worker that they are for, and then the commands.
--! keys workers heard orders dumps dumped

local time = redis.call('TIME')
local clock = time[1] * 1000 + math.floor(time[2] / 1000)
local now = tonumber(ARGV[1]) or clock
local verb, id = ARGV[2], ARGV[3]
local STARTED, STATE = 7, 10 -- where these are in what a worker says

local function exactly(number)
  return string.format('%.0f', number)
end

local function forget(gone)
  redis.call('HDEL', WORKERS, gone)
  redis.call('ZREM', HEARD, gone)
  redis.call('HDEL', ORDERS, gone)
  redis.call('HDEL', DUMPS, gone)
  redis.call('ZREM', DUMPED, gone)
end

local function seen(about, started)
  redis.call('HSET', WORKERS, id, about)
  redis.call('ZADD', HEARD, now, id)
  local waiting = redis.call('HGET', ORDERS, id)
  if not waiting then
    return {}
  end
  redis.call('HDEL', ORDERS, id)
  waiting = cmsgpack.unpack(waiting)
  -- What was meant for another worker of that name is not for this one.
  return table.remove(waiting, 1) == started and waiting or {}
end

local function steer(command, silence)
  local about, heard = redis.call('HGET', WORKERS, id), redis.call('ZSCORE', HEARD, id)
  if not about or not heard or tonumber(heard) < now - silence then
    return 'not_found'
  end
  about = cmsgpack.unpack(about)
  local started, is_stopping = about[STARTED], about[STATE] == 'stopping'
  local waiting = redis.call('HGET', ORDERS, id)
  waiting = waiting and cmsgpack.unpack(waiting) or {started}
  local left = {started}
  if waiting[1] == started then
    for place = 2, #waiting do
      local one = waiting[place]
      is_stopping = is_stopping or one == 'stop'
      -- A dump, and the last of the other words.
      if one ~= command and (one == 'dump' or command == 'dump') then
        left[#left + 1] = one
      end
    end
  end
  if is_stopping and command ~= 'dump' then
    return 'stopping'
  end
  left[#left + 1] = command
  redis.call('HSET', ORDERS, id, cmsgpack.pack(left))
  return 'asked'
end

local function list(silence, age)
  for _, gone in ipairs(redis.call('ZRANGEBYSCORE', HEARD, '-inf', '(' .. exactly(now - silence))) do
    forget(gone)
  end
  for _, over in ipairs(redis.call('ZRANGEBYSCORE', DUMPED, '-inf', exactly(now - age))) do
    redis.call('HDEL', DUMPS, over)
    redis.call('ZREM', DUMPED, over)
  end
  local replies = {}
  local heard = redis.call('ZRANGE', HEARD, 0, -1, 'WITHSCORES')
  for i = 1, #heard, 2 do
    local info = redis.call('HGET', WORKERS, heard[i])
    if info then
      replies[#replies + 1] = info
      replies[#replies + 1] = heard[i + 1]
    end
  end
  return replies
end

local function keep(text)
  if redis.call('HEXISTS', WORKERS, id) == 0 then
    return 0
  end
  redis.call('HSET', DUMPS, id, text)
  redis.call('ZADD', DUMPED, now, id)
  return 1
end

local function dump(age)
  local at = redis.call('ZSCORE', DUMPED, id)
  if not at or tonumber(at) <= now - age then
    return {}
  end
  return {at, redis.call('HGET', DUMPS, id)}
end

if verb == 'seen' then
  return seen(ARGV[4], tonumber(ARGV[5]))
elseif verb == 'gone' then
  forget(id)
  return {}
elseif verb == 'list' then
  return list(tonumber(ARGV[3]), tonumber(ARGV[4]))
elseif verb == 'steer' then
  return steer(ARGV[4], tonumber(ARGV[5]))
elseif verb == 'dump' then
  return keep(ARGV[4])
end
return dump(tonumber(ARGV[4]))
