-- Return the group mode that is recorded for a queue, or ''.
--
-- ARGV: 1 the time, the mode to record if there is none, '1' to record it for a queue that does not exist yet, too.
--! keys meta

local recorded = redis.call('HGET', META, 'mode')
if recorded then return recorded end
if ARGV[2] ~= '' and (ARGV[3] == '1' or redis.call('EXISTS', META) == 1) then
  redis.call('HSET', META, 'mode', ARGV[2])
  return ARGV[2]
end
return ''
