-- Count a queue's jobs.
--
-- Returns the counters, and the numbers of delayed jobs, active jobs and dead letters.
--! keys meta due lease dead

return {
  redis.call('HGETALL', META), redis.call('ZCARD', DUE), redis.call('ZCARD', LEASE), redis.call('ZCARD', DEAD),
}
