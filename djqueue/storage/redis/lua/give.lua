-- Give pending and failed jobs to another queue, or say which would go.
-- Arguments: 'give' or 'look', that queue, what the settings say of groups; then the ids. Keys: of each its result, its
-- log lines, its items, and where it is noted to have gone, for those who have begun to wait for it and were not heard of
-- yet.
-- Answers for each 'moved', 'not_found', 'active' or 'ended'; with 'look' also its unique key, or '', whether it has
-- failed, and whether it has a group ('1').
--! include base job ready completion removal

local NOTED = 3600000
local is_look, target = ARGV[ARGS] == 'look', ARGV[ARGS + 1]
configure_groups(ARGV[ARGS + 2])

local function obstacle(job)
  if not job or is_over(job) then return 'not_found' end
  if job.state == ACTIVE then return 'active' end
  if job.state == FAILED and call('HEXISTS', LETTERS, job.id) == 1 then return nil end
  return ENDED[job.state] and 'ended'
end

local function give(job, result_key, log_key, items_key, moved_key)
  local id = job.id
  local blob = call('HGET', JOBS, id)
  local runs, progress = call('HGET', HIST, id), call('HGET', PROG, id)
  local lines = call('LRANGE', log_key, 0, -1)
  -- Those that hang here up to now are told where it is, once it is there.
  local hanging = call('ZRANGEBYLEX', DEPS, '[' .. id .. NUL, '(' .. id .. AFTER, 'LIMIT', 0, 1)
  local before = #hanging > 0 and numbers('sent', 1) or false
  local unmet = keep.unmet_of(id)
  local needs = call('SREM', NEEDS, id) == 1 and job.inc
  local letter = job.state == FAILED and {job.finished, call('HGET', LETTERS, id)}
  local body = job.b
  if body[ITEMS] then body = {unpack(body, 1, RETRIES)} end
  send(target, {
    'job', id, sub(blob, 17), sub(blob, 9, 16), encode(body), false, runs, progress, lines, unmet, before, needs,
    letter,
  })
  remove(job, result_key, log_key, items_key, true)
  call('SET', moved_key, target, 'PX', NOTED)
end

local replies = {}
for i = ARGS + 3, #ARGV do
  local key = FIXED + 4 * (i - ARGS - 3)
  local job = load(ARGV[i])
  local word = obstacle(job) or 'moved'
  if is_look then
    replies[#replies + 1] = {
      word, job and job.o.unique_key or '', job and job.state == FAILED and 1 or 0, job and job.o.group and '1' or '',
    }
  else
    if word == 'moved' then give(job, KEYS[key + 1], KEYS[key + 2], KEYS[key + 3], KEYS[key + 4]) end
    replies[#replies + 1] = word
  end
end
return answer(replies)
