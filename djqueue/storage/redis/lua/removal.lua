-- Remove, move or retry a job.
--
-- Separate from completion.lua, which most scripts include: a script may have only two hundred local names.

local function take_dead_letter(job)
  call('ZREM', DEAD, job.id)
  call('HDEL', DEAD_LETTERS, job.id)
  call('ZREM', AUTO_RETRIES, job.id)
  call('ZREM', FINISHED, job.id)
  keep.forget(job)
end

-- Return the dependencies that a blocked job waits for: (queue, id) each, without the active job with its unique key.
function keep.unmet_of(id)
  local prefix, unmet = id .. NUL, {}
  for _, entry in ipairs(call('ZRANGEBYLEX', UNMET, '[' .. prefix, '(' .. id .. AFTER)) do
    local rest = sub(entry, #prefix + 1)
    local at = string.find(rest, NUL, 1, true)
    if at > 1 then unmet[#unmet + 1] = {sub(rest, 1, at - 1), sub(rest, at + 1)} end
  end
  return unmet
end

-- Return whether a blocked job also waits for dependencies that have failed: it failed because of one and was retried.
function keep.waits_for_failed(job)
  return job.b[ERROR_TYPE] ~= ''
end

-- Let a retried job depend on others again: it waits for those in `unmet`, and may read the records of the others.
local function depend_again(job, unmet)
  local missing = {}
  for _, key in ipairs(unmet) do missing[key[1] .. NUL .. key[2]] = true end
  call('SADD', NEEDS, job.id)
  for _, key in ipairs(job.o.depends_on) do
    if missing[key[1] .. NUL .. key[2]] then
      call('ZADD', UNMET, 0, job.id .. NUL .. key[1] .. NUL .. key[2])
      job.unmet = true
    end
    send(key[1], {'await', key[2], job.id, job.inc, dependency_rule_of(job.o), false, false, true})
  end
end

-- Make a dead letter pending again. unmet: the dependencies that it waits for; nil if it did not fail because of one.
local function revive(job, retries, unmet)
  take_dead_letter(job)
  local b = job.b
  restart(job)
  b[FAILURES], b[STALLS], b[REASON], b[WORKER] = 0, 0, '', ''
  b[RUN_AT], b[RETRIES] = now, retries
  job.finished, job.expires = nil, nil
  take_key(job)
  if unmet and job.o.depends_on then depend_again(job, unmet) end
  make_pending(job)
  save(job) --@ retry_dead: failed -> waiting|blocked
  emit_event(job.id, job.name, 'requeued', NAMES[job.state])
end

-- Remove a job that is not active.
local function remove(job, result_key, log_key, items_key, keeps_dependents)
  local state = job.state
  local over = is_over(job)
  if state == FAILED then
    take_dead_letter(job)
    if not keeps_dependents then dependents.note_end(job, 'cancelled') end
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
    leave_pending(job)
    release_key(job)
    call('ZREM', TTL, job.id)
    if not keeps_dependents then
      dependents.note_end(job, 'cancelled')
      dependents.release(job)
    end
  end
  call('HINCRBY', META, state == COMPLETED and 'gone:c' or state == CANCELLED and 'gone:x' or 'gone', 1)
  keep.index_subject('ZREM', job)
  call('HDEL', JOBS, job.id)
  call('HDEL', ST, job.id)
  call('HDEL', HIST, job.id)
  call('HDEL', PROG, job.id)
  call('DEL', result_key, log_key)
  if job.b[ITEMS] then call('UNLINK', items_key) end
  note(job.id, 'r')
  emit_event(job.id, job.name, 'removed', NAMES[state])
  return over
end

local function move(job, run_at, event)
  leave_pending(job)
  job.b[RUN_AT] = run_at
  make_pending(job)
  save(job) --@ promote: delayed -> waiting --@ reschedule: waiting|delayed -> waiting|delayed
  emit_event(job.id, job.name, event, NAMES[job.state])
end
