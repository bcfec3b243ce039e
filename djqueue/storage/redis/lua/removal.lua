-- Take a job out of its place: retry a dead one, remove one, or move one to another time.
--
-- Apart from `ends`, which most scripts include: a script may have 200 local names.

local function take_letter(job)
  call('ZREM', DEAD, job.id)
  call('HDEL', LETTERS, job.id)
  call('ZREM', AGAIN, job.id)
  call('ZREM', FINISHED, job.id)
  keep.forget(job)
end

-- What a blocked job waits for: (queue, id); but not the active job that it follows with its unique key.
function keep.unmet_of(id)
  local prefix, unmet = id .. NUL, {}
  for _, entry in ipairs(call('ZRANGEBYLEX', UNMET, '[' .. prefix, '(' .. id .. AFTER)) do
    local rest = sub(entry, #prefix + 1)
    local at = string.find(rest, NUL, 1, true)
    if at > 1 then unmet[#unmet + 1] = {sub(rest, 1, at - 1), sub(rest, at + 1)} end
  end
  return unmet
end

-- Whether a blocked job waits for a dependency that has failed, too: it has failed for one before, and was retried.
function keep.is_patient(job)
  return job.b[ERROR_TYPE] ~= ''
end

-- A retried job depends on others again: on those in `lacks` it waits, of the others it may read the records.
local function depend_again(job, lacks)
  local missing = {}
  for _, key in ipairs(lacks) do missing[key[1] .. NUL .. key[2]] = true end
  call('SADD', NEEDS, job.id)
  for _, key in ipairs(job.o.depends_on) do
    if missing[key[1] .. NUL .. key[2]] then
      call('ZADD', UNMET, 0, job.id .. NUL .. key[1] .. NUL .. key[2])
      job.unmet = true
    end
    local rule = job.o.on_dependency_failure or 'fail'
    send(key[1], {'await', key[2], job.id, job.inc, rule, false, false, true})
  end
end

-- lacks: the dependencies that a job waits for again; nil if it failed for none.
local function revive(job, retries, lacks)
  take_letter(job)
  local b = job.b
  restart(job)
  b[FAILURES], b[STALLS], b[REASON], b[WORKER] = 0, 0, '', ''
  b[RUN_AT], b[RETRIES] = now, retries
  job.finished, job.expires = nil, nil
  take_key(job)
  if lacks and job.o.depends_on then depend_again(job, lacks) end
  place(job)
  save(job) --@ retry_dead: failed -> waiting|blocked
  tell(job.id, job.name, 'retried', NAMES[job.state])
end

-- Forget a job that is not active. keys: of its result, of its log lines and of its items.
local function remove(job, result_key, log_key, items_key, keeps_dependents)
  local state = job.state
  local over = is_over(job)
  if state == FAILED then
    take_letter(job)
    if not keeps_dependents then note_end(job, 'cancelled') end
  elseif ENDED[state] then
    local is_held = keep.is_held(job)
    if is_held then
      keep.count(job, -1)
      call('ZREMRANGEBYLEX', HOLDS, '[' .. job.id .. NUL, '(' .. job.id .. AFTER)
    end
    call('ZREM', FINISHED, job.id)
    keep.forget(job, is_held)
    add(state, -1)
  else
    displace(job)
    release_key(job)
    call('ZREM', TTL, job.id)
    if not keeps_dependents then
      note_end(job, 'cancelled')
      keep.release(job)
    end
  end
  call('HINCRBY', META, state == COMPLETED and 'gone:c' or state == CANCELLED and 'gone:x' or 'gone', 1)
  keep.about('ZREM', job)
  call('HDEL', JOBS, job.id)
  call('HDEL', ST, job.id)
  call('HDEL', HIST, job.id)
  call('HDEL', PROG, job.id)
  call('DEL', result_key, log_key)
  if job.b[ITEMS] then call('UNLINK', items_key) end
  note(job.id, 'r')
  tell(job.id, job.name, 'removed', NAMES[state])
  return over
end

local function move(job, run_at, event)
  displace(job)
  job.b[RUN_AT] = run_at
  place(job)
  save(job) --@ promote: delayed -> waiting --@ reschedule: waiting|delayed -> waiting|delayed
  tell(job.id, job.name, event, NAMES[job.state])
end
