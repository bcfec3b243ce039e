-- Pause, resume or limit a queue.
--
-- ARGV: the operation; for 'limit' the rate (capacity, per) and the concurrency ('' each for none), and '1' each if the
--   rate and the concurrency change. A queue without overrides gets all of them.
-- Returns 1 if the queue is new, else 0.
--! include base

local operation = ARGV[ARGS]
local is_new = call('EXISTS', META) == 0 and 1 or 0
if operation == 'pause' then
  call('HSET', META, 'paused', 1)
elseif operation == 'resume' then
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
