-- What becomes of the items of jobs that have completed: they last as long as the result would if nobody held it, or go
-- if they were those of an earlier run. Arguments: ids. Keys: of each, its items.
--! include base job

for i = ARGS, #ARGV do
  local job, key = load(ARGV[i]), KEYS[FIXED + i - ARGS + 1]
  local many = job and job.state == COMPLETED and job.b[ITEMS]
  if many == 0 then
    call('UNLINK', key)
    job.b[ITEMS] = job.b[READABLE] and false
    save(job) --@ nothing changes: it has completed
  elseif many then
    local over = job.b[READABLE] and math.abs(job.b[READABLE])
    if not over and job.o.result_ttl ~= false then over = job.finished + (job.o.result_ttl or 3600000) end
    if over then call('PEXPIRE', key, math.max(1, over - now)) end
  end
end
return answer(0)
