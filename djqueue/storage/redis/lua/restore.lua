-- Add the next chunk of a snapshot's jobs to a queue, as they were saved.
--
-- KEYS: of each job, its result, its log lines and its items.
-- ARGV: the configuration of groups; what is dropped above the maximum size ('' nothing, 'o' the oldest, 'l' the lowest
--   priority); the packed ids of the chunk.
-- restore  list of packed ids and jobs in turn. Each job is id, enqueued at (8), record from the flag on, state code, body
--          or false for a job that waits as it was enqueued, ended at, ended attempts, progress, log lines, items, result,
--          dead letter with its number and time of expiry, dependencies in the snapshot, and those it waits for; false
--          stands for a missing part.
-- Returns the number of jobs, or -1 if the next chunk has other ids.
--! include base job ready completion removal room
--! keys restore

configure_groups(ARGV[ARGS])
local rank = ARGV[ARGS + 1]

local function expire_with_result(key, job)
  local readable = keep.readable_for(job)
  if not readable then return end
  local left = job.finished + readable - now
  if left > 0 then call('PEXPIRE', key, left) else call('UNLINK', key) end
end

local function end_job(job, finished, result, result_key, items_key)
  job.finished = finished
  keep.note_details(job, result and #result or nil)
  keep.expire_in(job, keep.kept_for(job))
  add(job.state, 1)
  save(job) --@ nothing changes: it ended before it was saved
  if result then
    call('SET', result_key, result)
    expire_with_result(result_key, job)
  end
  if job.b[ITEMS] and job.state == COMPLETED then expire_with_result(items_key, job) end
end

local function fail_job(job, finished, letter)
  job.finished, job.expires = finished, letter[3]
  call('ZADD', FINISHED, job.expires, job.id)
  call('ZADD', DEAD, letter[2], job.id)
  call('HSET', DEAD_LETTERS, job.id, letter[1])
  local next_retry = decode(letter[1])[5]
  if next_retry ~= 0 then call('ZADD', AUTO_RETRIES, next_retry, job.id) end
  keep.note_details(job)
  keep.count_bytes(job, 1)
  save(job) --@ nothing changes: it failed before it was saved
end

local function depend(job, needed, unmet)
  if #needed == 0 then return end
  call('SADD', NEEDS, job.id)
  for _, key in ipairs(unmet) do
    call('ZADD', UNMET, 0, job.id .. NUL .. key[1] .. NUL .. key[2])
    job.unmet = true
  end
  local is_patient = keep.waits_for_failed(job)
  for _, key in ipairs(needed) do
    send(key[1], {'await', key[2], job.id, job.inc, dependency_rule_of(job.o), false, false, is_patient})
  end
end

local function restore(m, result_key, log_key, items_key)
  local id, created, rest, state, body, finished, runs, progress, lines, items, result, letter, needed, unmet = unpack(m, 1, 14)
  call('DEL', result_key, log_key, items_key)
  local blob = pack('>I8', next_numbers('rear', 1)) .. created .. rest
  call('HSET', JOBS, id, blob)
  local job = parse(id, blob)
  keep.index_subject('ZADD', job)
  if runs then call('HSET', HIST, id, runs) end
  if progress then call('HSET', PROG, id, progress) end
  if lines then variadic('RPUSH', log_key, lines) end
  if items then variadic('RPUSH', items_key, items) end
  if body then job.b = body end
  if state == FAILED then
    job.state = FAILED
    fail_job(job, finished, letter)
  elseif state ~= WAITING then
    job.state = state
    end_job(job, finished, result, result_key, items_key)
  elseif not body then
    call('RPUSH', W, job.inc .. id)
    add('n:' .. job.name, 1)
    note(id, WAITING)
  else
    local key = job.o.unique_key
    if key and not owner_of(key) then take_key(job) end
    depend(job, needed, unmet)
    if job.o.ttl and job.b[STARTED] == 0 then call('ZADD', TTL, job.created + job.o.ttl, id) end
    make_pending(job)
    save(job) --@ nothing changes: it waited before it was saved
  end
  if rank ~= '' and state == WAITING then call('ZADD', DROPS, 0, drop_member(job, rank)) end
end

if call('LINDEX', RESTORE, 0) ~= ARGV[ARGS + 2] then return answer(-1) end
local jobs = decode(call('LINDEX', RESTORE, 1))
for i, m in ipairs(jobs) do
  local key = FIXED + 3 * (i - 1)
  restore(m, KEYS[key + 1], KEYS[key + 2], KEYS[key + 3])
end
call('LPOP', RESTORE, 2)
return answer(#jobs)
