-- Pause, resume or limit a queue, or hold or release the jobs of a name.
--
-- ARGV: the operation; for 'limit' the rate (capacity, per) and the concurrency ('' each for none), and '1' each if the
--   rate and the concurrency change. A queue without overrides gets all of them. For 'hold' and 'release' the name, and
--   for 'hold' when it ends (0: never) and its reason.
-- Returns 1 if the queue is new, and for 'release' if there was a hold, else 0.
--! include base

local operation = ARGV[ARGS]
local is_new = call('EXISTS', META) == 0 and 1 or 0
if operation == 'pause' then
  call('HSET', META, 'paused', 1)
elseif operation == 'resume' then
  call('HDEL', META, 'paused')
  woken = true
elseif operation == 'hold' or operation == 'release' then
  -- A hold is {name, since, until or 0, reason}. With some, `held` keeps claims from finish_and_claim_fast.lua: it is 2,
  -- or stays 1 if the next job is too heavy.
  local name, was_held, left = ARGV[ARGS + 1], 0, {}
  for _, hold in ipairs(decode(call('HGET', META, 'holds') or '\144')) do
    if hold[3] == 0 or hold[3] > now then
      if hold[1] == name then was_held = 1 else left[#left + 1] = hold end
    end
  end
  if operation == 'hold' then left[#left + 1] = {name, now, tonumber(ARGV[ARGS + 2]), ARGV[ARGS + 3]} end
  if #left > 0 then
    call('HSET', META, 'holds', encode(left))
    call('HSETNX', META, 'held', 2)
  else
    call('HDEL', META, 'holds')
    if call('HGET', META, 'held') == '2' then call('HDEL', META, 'held') end
  end
  if operation == 'release' then
    woken = true
    return answer(was_held)
  end
else
  local is_first = call('HSETNX', META, 'limited', 1) == 1
  if is_first or ARGV[ARGS + 4] == '1' then
    call('HSET', META, 'capacity', ARGV[ARGS + 1], 'per', ARGV[ARGS + 2])
  end
  if is_first or ARGV[ARGS + 5] == '1' then call('HSET', META, 'concurrency', ARGV[ARGS + 3]) end
  woken = true
end
return answer(is_new)
