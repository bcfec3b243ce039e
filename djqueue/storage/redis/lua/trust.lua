-- Record since when the mirror follows a queue, if it is listed.
--
-- ARGV: 1 the time, the queue's name, the time to record.
-- Returns 1 or 0.
--! keys queues mirror

if redis.call('SISMEMBER', QUEUES, ARGV[2]) == 1 then
  redis.call('HSET', MIRROR, ARGV[2], ARGV[3])
  return 1
end
return 0
