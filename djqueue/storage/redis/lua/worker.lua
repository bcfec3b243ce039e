-- The workers. Arguments: 'seen', 'gone' or 'list', a worker's id and what it says of itself, or the
-- milliseconds after which a silent one counts as gone. Answers what the workers said, each with the time.
--! keys workers heard

local time = redis.call('TIME')
local clock = time[1] * 1000 + math.floor(time[2] / 1000)
local now = tonumber(ARGV[1]) or clock
local verb = ARGV[2]
if verb == 'seen' then
  redis.call('HSET', WORKERS, ARGV[3], ARGV[4])
  redis.call('ZADD', HEARD, now, ARGV[3])
elseif verb == 'gone' then
  redis.call('HDEL', WORKERS, ARGV[3])
  redis.call('ZREM', HEARD, ARGV[3])
else
  local silent = redis.call('ZRANGEBYSCORE', HEARD, '-inf', '(' .. string.format('%.0f', now - tonumber(ARGV[3])))
  for _, id in ipairs(silent) do
    redis.call('HDEL', WORKERS, id)
    redis.call('ZREM', HEARD, id)
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
return {}
