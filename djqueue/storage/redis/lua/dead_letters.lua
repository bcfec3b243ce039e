-- Some of the dead letters, oldest first. Arguments: the number of the last one of an earlier page ('-inf' for the
-- first page), and how many at most. Answers the time, and of each its number, its job's id and the letter.
--! keys dead letters

local time = redis.call('TIME')
local clock = time[1] * 1000 + math.floor(time[2] / 1000)
local now = tonumber(ARGV[1]) or clock
local found = redis.call('ZRANGEBYSCORE', DEAD, ARGV[2], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[3])
local replies = {}
for i = 1, #found, 2 do
  local letter = redis.call('HGET', LETTERS, found[i])
  if letter then
    local n = #replies
    replies[n + 1], replies[n + 2], replies[n + 3] = found[i + 1], found[i], letter
  end
end
return {now, replies}
