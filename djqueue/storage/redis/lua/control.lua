-- Pause, resume or limit the queue. Arguments: the verb; for 'limit' the rate's capacity and length, and the
-- concurrency, each '' for none.
--! include base

local verb = ARGV[ARGS]
local is_new = call('EXISTS', META) == 0 and 1 or 0
if verb == 'pause' then
  call('HSET', META, 'paused', 1)
elseif verb == 'resume' then
  call('HDEL', META, 'paused')
  woken = true
else
  call('HSET', META, 'limited', 1, 'capacity', ARGV[ARGS + 1], 'per', ARGV[ARGS + 2], 'concurrency', ARGV[ARGS + 3])
  woken = true
end
return answer(is_new)
