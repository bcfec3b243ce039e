-- Store the report of a bulk write in place of one revision: see `djqueue.storage.bulkwrites`.
--
-- KEYS: the report.
-- ARGV: 1 the time, the expected revision ('0' for none), the next one, the report, the write, when it was changed, the
--   time up to which older reports are removed, milliseconds until this one expires, maximum number of reports.
-- Returns 1, or 0 if another revision is stored, and the writes whose reports are to be removed.
--! keys bulk_writes

if (redis.call('HGET', KEYS[2], 'revision') or '0') ~= ARGV[2] then return {0, {}} end
redis.call('HSET', KEYS[2], 'revision', ARGV[3], 'report', ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[8])
redis.call('ZADD', BULK_WRITES, ARGV[6], ARGV[5])
redis.call('PEXPIRE', BULK_WRITES, ARGV[8])
local gone = redis.call('ZRANGEBYSCORE', BULK_WRITES, '-inf', ARGV[7])
redis.call('ZREMRANGEBYSCORE', BULK_WRITES, '-inf', ARGV[7])
for _, write in ipairs(redis.call('ZRANGE', BULK_WRITES, 0, -tonumber(ARGV[9]) - 1)) do gone[#gone + 1] = write end
redis.call('ZREMRANGEBYRANK', BULK_WRITES, 0, -tonumber(ARGV[9]) - 1)
return {1, gone}
