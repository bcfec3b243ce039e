-- Pause, resume or limit the queue. Arguments: the verb; for 'limit' the rate's capacity and length, and the
-- concurrency, each '' for none, and whether the rate and the concurrency change (1) or stay as they are (0): then
-- those of the settings were given, for a queue that has no limits of its own yet.
--! include base

local verb = ARGV[ARGS]
local is_new = call('EXISTS', META) == 0 and 1 or 0
if verb == 'pause' then
  call('HSET', META, 'paused', 1)
elseif verb == 'resume' then
  call('HDEL', META, 'paused')
  woken = true
else
  local is_first = call('HSETNX', META, 'limited', 1) == 1
  if is_first or ARGV[ARGS + 4] == '1' then
    call('HSET', META, 'capacity', ARGV[ARGS + 1], 'per', ARGV[ARGS + 2])
  end
  if is_first or ARGV[ARGS + 5] == '1' then call('HSET', META, 'concurrency', ARGV[ARGS + 3]) end
  woken = true
end
return answer(is_new)
