-- Give pending jobs to another queue, but those that wait for others, or for which others wait.
-- Arguments: that queue, the group limit; then the ids. Keys: of each its result, its log lines, and where
-- it is noted to have gone, for those who have begun to wait for it and were not heard of yet.
--! include base job places ends

local NOTED = 3600000
local target = ARGV[ARGS]
group_limit = tonumber(ARGV[ARGS + 1])
local replies = {}
for i = ARGS + 2, #ARGV do
  local id, key = ARGV[i], FIXED + 3 * (i - ARGS - 2)
  local job = load(id)
  local goes = job and not ENDED[job.state] and job.state ~= ACTIVE and job.state ~= BLOCKED
    and #call('ZRANGEBYLEX', DEPS, '[' .. id .. NUL, '(' .. id .. AFTER, 'LIMIT', 0, 1) == 0
  if goes then
    local blob = call('HGET', JOBS, id)
    local runs, progress = call('HGET', HIST, id), call('HGET', PROG, id)
    local lines = call('LRANGE', KEYS[key + 2], 0, -1)
    send(target, {'job', id, sub(blob, 17), sub(blob, 9, 16), encode(job.b), false, runs, progress, lines})
    remove(job, KEYS[key + 1], KEYS[key + 2], true)
    call('SET', KEYS[key + 3], target, 'PX', NOTED)
  end
  replies[#replies + 1] = goes and 1 or 0
end
return answer(replies)
