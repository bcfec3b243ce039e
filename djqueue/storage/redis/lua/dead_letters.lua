-- Read dead letters, oldest first.
--
-- ARGV: 1 the time, the number of the last one of the previous page ('-inf' for the first page), maximum number.
-- Returns {time, dead letters}; each is number, job id, dead letter.
--! include common
--! keys dead dead_letters

local found = call('ZRANGEBYSCORE', DEAD, ARGV[2], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[3])
local replies = {}
for i = 1, #found, 2 do
  local dead_letter = call('HGET', DEAD_LETTERS, found[i])
  if dead_letter then
    local n = #replies
    replies[n + 1], replies[n + 2], replies[n + 3] = found[i + 1], found[i], dead_letter
  end
end
return {now, replies}
