-- Records of jobs as they are at one moment. Arguments: ids. Keys: of each its result and its log lines.
--! keys jobs st hist prog

local time = redis.call('TIME')
local clock = time[1] * 1000 + math.floor(time[2] / 1000)
local now = tonumber(ARGV[1]) or clock
local replies = {}
for i = 2, #ARGV do
  local id, key = ARGV[i], FIXED + 2 * (i - 2)
  local blob = redis.call('HGET', JOBS, id)
  replies[i - 1] = blob and {
    blob, redis.call('HGET', ST, id), redis.call('GET', KEYS[key + 1]), redis.call('HGET', PROG, id),
    redis.call('HGET', HIST, id), redis.call('LRANGE', KEYS[key + 2], 0, -1),
  }
end
return {string.format('%.0f', now), replies}
