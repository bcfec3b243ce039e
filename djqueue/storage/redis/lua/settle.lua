-- Let the items of completed jobs expire with their results, as if the records were not held. Items of an earlier attempt
-- are removed.
--
-- KEYS: of each job, its items.
-- ARGV: the ids.
--! include base job

for i = ARGS, #ARGV do
  local job, key = load(ARGV[i]), KEYS[FIXED + i - ARGS + 1]
  local count = job and job.state == COMPLETED and job.b[ITEMS]
  if count == 0 then
    call('UNLINK', key)
    job.b[ITEMS] = job.b[READABLE] and false
    save(job) --@ nothing changes: it has completed
  elseif count then
    local expires = job.b[READABLE] and math.abs(job.b[READABLE])
    local ttl = result_ttl_of(job)
    if not expires and ttl then expires = job.finished + ttl end
    if expires then call('PEXPIRE', key, math.max(1, expires - now)) end
  end
end
return answer(0)
