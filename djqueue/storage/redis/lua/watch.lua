-- Have events told: all ('*') or those of a job ('=' and its id), for so many milliseconds.
--! keys watch

local time = redis.call('TIME')
local clock = time[1] * 1000 + math.floor(time[2] / 1000)
local lasts = tonumber(ARGV[2])
for i = 3, #ARGV do
  redis.call('HSET', WATCH, ARGV[i], string.format('%.0f', clock + lasts))
end
redis.call('PEXPIRE', WATCH, lasts)
return 1
