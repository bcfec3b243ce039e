-- Count a queue's jobs.
--
-- Returns the counters, and the numbers of delayed jobs, active jobs and dead letters.
--! keys count due lease dead

return {
  redis.call('HGETALL', COUNT), redis.call('ZCARD', DUE), redis.call('ZCARD', LEASE), redis.call('ZCARD', DEAD),
}
