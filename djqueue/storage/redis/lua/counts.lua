-- How many jobs are where, each number from the one place that knows it.
--! keys count due lease dead

return {
  redis.call('HGETALL', COUNT), redis.call('ZCARD', DUE), redis.call('ZCARD', LEASE), redis.call('ZCARD', DEAD),
}
