-- Another payload for one job in the place of the one that the caller knows. Arguments: '1' for a dead letter, which then
-- waits with it, '0' for a pending job; the payload; the one that is known; what the settings say of groups; then the id.
--! include base job ready completion removal

local retries, payload, old = ARGV[ARGS] == '1', ARGV[ARGS + 1], ARGV[ARGS + 2]
configure_groups(ARGV[ARGS + 3])

local function revised(job)
  if not job then return 'not_found' end
  if retries and job.state ~= FAILED or not retries and (ENDED[job.state] or job.state == ACTIVE) then
    return NAMES[job.state]
  end
  local blob = call('HGET', JOBS, job.id)
  local at = #blob - job.size
  if sub(blob, at + 1) ~= old then return 'changed' end
  if retries then
    if job.o.unique_key and owner_of(job.o.unique_key) then return 'unique_key_taken' end
    local kept = call('HGET', LETTERS, job.id)
    revive(job, 0, kept and decode(kept)[9])
  else
    note(job.id, 'u')
  end
  call('HSET', JOBS, job.id, sub(blob, 1, at) .. payload)
  return retries and 'retried' or 'updated'
end

return answer({revised(load(ARGV[ARGS + 4]))})
