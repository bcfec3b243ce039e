-- Keep a report of a bulk write in place of the one of a revision: see `djqueue.storage.bulkwrites`.
--
-- Keys: the report. Arguments, behind the time: the revision that is to be there ('0' none), the next one, the
-- report, the write, when it was changed, the time up to which older ones go, milliseconds until this one expires,
-- how many are kept. Answers 1, or 0 if another revision is there, and the writes whose reports are to go.
--! keys imports

if (redis.call('HGET', KEYS[2], 'revision') or '0') ~= ARGV[2] then return {0, {}} end
redis.call('HSET', KEYS[2], 'revision', ARGV[3], 'report', ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[8])
redis.call('ZADD', IMPORTS, ARGV[6], ARGV[5])
redis.call('PEXPIRE', IMPORTS, ARGV[8])
local gone = redis.call('ZRANGEBYSCORE', IMPORTS, '-inf', ARGV[7])
redis.call('ZREMRANGEBYSCORE', IMPORTS, '-inf', ARGV[7])
for _, write in ipairs(redis.call('ZRANGE', IMPORTS, 0, -tonumber(ARGV[9]) - 1)) do gone[#gone + 1] = write end
redis.call('ZREMRANGEBYRANK', IMPORTS, 0, -tonumber(ARGV[9]) - 1)
return {1, gone}
