-- Read the parts of many jobs that have keys of their own, for the mirror: see records.lua.
--
-- KEYS: results, then log lines, of different jobs.
-- ARGV: 1 the time, number of results.
-- Returns {results, log lines}; the last list is empty if none of the jobs has any.

local count = tonumber(ARGV[2])
local results, lines = {}, {}
if count > 0 then results = redis.call('MGET', unpack(KEYS, 1, count)) end
if #KEYS > count and redis.call('EXISTS', unpack(KEYS, count + 1)) > 0 then
  for at = count + 1, #KEYS do lines[at - count] = redis.call('LRANGE', KEYS[at], 0, -1) end
end
return {results, lines}
