-- Read results until a reply has enough bytes.
--
-- KEYS: the results.
-- ARGV: 1 the time, the size in bytes at which a reply ends.
-- Returns the results that were read, at least one; nil for one that does not exist.

local most_bytes, size, replies = tonumber(ARGV[2]), 0, {}
for i = 1, #KEYS do
  if size >= most_bytes then break end
  local result = redis.call('GET', KEYS[i])
  replies[i] = result
  size = size + (result and #result or 0)
end
return replies
