-- Note since when a queue is followed by the mirror, if it is listed. Arguments: its name, a time.
--! keys queues mirror

if redis.call('SISMEMBER', QUEUES, ARGV[2]) == 1 then
  redis.call('HSET', MIRROR, ARGV[2], ARGV[3])
  return 1
end
return 0
