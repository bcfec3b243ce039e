-- Whether a claim may find something: {1}, or {0, milliseconds until the clock alone may bring something, or -1}.
--! keys w z asides due

if redis.call('LLEN', W) > 0 or redis.call('ZCARD', Z) > 0 or redis.call('ZCARD', ASIDES) > 0 then
  return {1}
end
local due = redis.call('ZRANGE', DUE, 0, 0, 'WITHSCORES')
if not due[2] then return {0, -1} end
local time = redis.call('TIME')
local clock = time[1] * 1000 + math.floor(time[2] / 1000)
local left = tonumber(due[2]) - (tonumber(ARGV[1]) or clock)
if left <= 0 then return {1} end
return {0, left}
