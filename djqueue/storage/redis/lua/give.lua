-- Move pending and failed jobs to another queue, or check which can be moved.
--
-- KEYS: of each job, its result, its log lines, its items, and the forwarding note for jobs that began to wait for it and
--   are not known here yet.
-- ARGV: 'give' or 'look', the other queue, the configuration of groups; then the ids.
-- Returns for each 'moved', 'not_found', 'active' or 'ended'; with 'look' a list of that, its unique key or '', 1 if it
--   has failed, and '1' if it has a group.
--! include base job ready completion removal

local is_look, target = ARGV[ARGS] == 'look', ARGV[ARGS + 1]
configure_groups(ARGV[ARGS + 2])

local function obstacle(job)
  if not job or is_over(job) then return 'not_found' end
  if job.state == ACTIVE then return 'active' end
  if job.state == FAILED and call('HEXISTS', DEAD_LETTERS, job.id) == 1 then return nil end
  return ENDED[job.state] and 'ended'
end

local function move_away(job, result_key, log_key, items_key, moved_key)
  local id = job.id
  local blob = call('HGET', JOBS, id)
  local runs, progress = call('HGET', HIST, id), call('HGET', PROG, id)
  local lines = call('LRANGE', log_key, 0, -1)
  -- The present dependents learn of the new queue once the job has arrived there.
  local before = has_entries(DEPS, id) and next_numbers('sent', 1) or false
  local unmet = keep.unmet_of(id)
  local needs = call('SREM', NEEDS, id) == 1 and job.inc
  local dead_letter = job.state == FAILED and {job.finished, call('HGET', DEAD_LETTERS, id)}
  local body = job.b
  if body[ITEMS] then body = {unpack(body, 1, RETRIES)} end
  send(target, {
    'job', id, sub(blob, 17), sub(blob, 9, 16), encode(body), false, runs, progress, lines, unmet, before, needs,
    dead_letter,
  })
  remove(job, result_key, log_key, items_key, true)
  call('SET', moved_key, target, 'PX', HOUR)
end

local replies = {}
for i = ARGS + 3, #ARGV do
  local key = FIXED + 4 * (i - ARGS - 3)
  local job = load(ARGV[i])
  local result = obstacle(job) or 'moved'
  if is_look then
    replies[#replies + 1] = {
      result, job and job.o.unique_key or '', job and job.state == FAILED and 1 or 0, job and job.o.concurrency_key and '1' or '',
    }
  else
    if result == 'moved' then move_away(job, KEYS[key + 1], KEYS[key + 2], KEYS[key + 3], KEYS[key + 4]) end
    replies[#replies + 1] = result
  end
end
return answer(replies)
