-- Read the log lines of many jobs, for the mirror.
--
-- KEYS: the log lines of each job.
-- ARGV: 1 the time.
-- Returns the lines of each job, oldest first.

local found = {}
for at = 1, #KEYS do found[at] = redis.call('LRANGE', KEYS[at], 0, -1) end
return found
