-- Forget jobs that are not active. Arguments: 'any', 'over' (its time is over), 'dead' (the oldest dead letters
-- above this number), 'surplus' (records above this number), 'gone' (what is left of those that are not there) or 'clean'; a number for 'dead' and 'surplus', a time for 'clean' (ended, or enqueued, before it); the
-- states for 'clean' and 'surplus' (MessagePack); the group limit; then the ids. Keys: of each its result and its log lines.
--! include base job places ends

local mode, bound, states = ARGV[ARGS], tonumber(ARGV[ARGS + 1]), decode(ARGV[ARGS + 2])
group_limit = tonumber(ARGV[ARGS + 3])
local wanted = {}
for _, state in ipairs(states) do wanted[state] = true end

local function may_go(job)
  if not job or job.state == ACTIVE then return false end
  if mode == 'gone' then return false end
  if mode == 'over' then return is_over(job) end
  if mode == 'dead' then return job.state == FAILED and call('ZCARD', DEAD) > bound end
  if mode == 'surplus' then
    return wanted[NAMES[job.state]] and tonumber(call('HGET', COUNT, job.state) or 0) > bound
  end
  if mode == 'clean' then return wanted[NAMES[job.state]] and (job.finished or job.created) < bound end
  return true
end

local replies = {}
for i = ARGS + 4, #ARGV do
  local job, key = load(ARGV[i]), FIXED + 2 * (i - ARGS - 4)
  local goes = may_go(job)
  if goes then remove(job, KEYS[key + 1], KEYS[key + 2]) end
  if not job and mode == 'gone' then call('UNLINK', KEYS[key + 1], KEYS[key + 2]) end
  replies[#replies + 1] = goes and 1 or 0
end
return answer(replies)
