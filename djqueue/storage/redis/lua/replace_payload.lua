-- Replace a job's payload, if it is the one that the caller knows.
--
-- ARGV: '1' for a dead letter, which is retried then, or '0' for a pending job; the payload; the known payload; the
--   configuration of groups; the id.
-- Returns 'updated', 'retried', 'changed', 'unique_key_taken', 'not_found' or the job's state.
--! include base job ready completion removal

local retries, payload, old = ARGV[ARGS] == '1', ARGV[ARGS + 1], ARGV[ARGS + 2]
configure_groups(ARGV[ARGS + 3])

local function replace(job)
  if not job then return 'not_found' end
  if retries and job.state ~= FAILED or not retries and (ENDED[job.state] or job.state == ACTIVE) then
    return NAMES[job.state]
  end
  local blob = call('HGET', JOBS, job.id)
  local at = #blob - job.size
  if sub(blob, at + 1) ~= old then return 'changed' end
  if retries then
    if job.o.unique_key and owner_of(job.o.unique_key) then return 'unique_key_taken' end
    local kept = call('HGET', DEAD_LETTERS, job.id)
    revive(job, 0, kept and decode(kept)[9])
  else
    note(job.id, 'u')
  end
  call('HSET', JOBS, job.id, sub(blob, 1, at) .. payload)
  return retries and 'retried' or 'updated'
end

return answer({replace(load(ARGV[ARGS + 4]))})
