-- The mode that is recorded with the queue, or '' if none is.
--
-- Arguments: the mode to record if there is none; whether also for a queue that is not there yet ('1').
--! keys meta

local recorded = redis.call('HGET', META, 'mode')
if recorded then return recorded end
if ARGV[2] ~= '' and (ARGV[3] == '1' or redis.call('EXISTS', META) == 1) then
  redis.call('HSET', META, 'mode', ARGV[2])
  return ARGV[2]
end
return ''
