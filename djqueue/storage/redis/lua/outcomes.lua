-- Apply the outcomes of attempts: inserted in finish_and_claim.
--
-- Sets `accepted` (a flag for each outcome), `seen` (their jobs) and `streamed` (completed jobs with items).

local completed = 0
local has_no_dependents = call('ZCARD', DEPS) == 0
local is_bounded = call('HEXISTS', META, 'bounds') == 1

local function complete(i, job, kind, data)
  job.state, job.finished = COMPLETED, now
  clear_error(job)
  set_expiry(job, keep.kept_for(job), kind == 'c' and #data or nil)
  completed = completed + 1
  save(job) --@ complete: active -> completed
  if kind == 'c' then
    local readable = keep.readable_for(job)
    if not readable or job.has_dependents then
      call('SET', KEYS[FIXED + i], data)
    else
      call('SET', KEYS[FIXED + i], data, 'PX', math.max(1, readable))
    end
  end
  if job.b[ITEMS] then streamed[#streamed + 1] = job.id end
  after_end(job, true)
  emit_event(job.id, job.name, 'completed', 'completed')
end

local function again(job, outcome, data)
  note_attempt(job, outcome, data[2])
  local b = job.b
  if outcome == 'released' then
    b[ATTEMPTS] = b[ATTEMPTS] - 1
  else
    b[FAILURES] = b[FAILURES] + 1
  end
  if data[2] then set_error(job, data[2]) end
  if is_followed(job) then
    call('HINCRBY', META, 'otherwise', 1)
    cancel(job, 'replaced', true) -- of two waiting jobs with one key the newer one is kept
    return
  end
  restart(job)
  call('HINCRBY', META, outcome == 'retried' and outcome or 'otherwise', 1)
  b[WORKER] = ''
  b[RUN_AT] = now + data[1]
  put_back(job, outcome ~= 'retried')
  save(job) --@ retry: active -> waiting|delayed --@ release: active -> waiting|delayed
  woken = true
  emit_event(job.id, job.name, outcome, NAMES[job.state])
end

local function apply(i, job, kind, data)
  call('ZREM', LEASE, job.id)
  add('e', 1 - weight_of(job))
  if kind == 'c' or kind == 'n' then
    complete(i, job, kind, data)
    return
  end
  data = decode(data)
  if kind ~= 'r' and kind ~= 'l' or job.b[CANCEL] == 1 then call('HINCRBY', META, 'otherwise', 1) end
  if kind == 'f' then
    note_attempt(job, 'failed', data[2])
    job.b[FAILURES] = job.b[FAILURES] + 1
    bury(job, data[1], data[2] or {'', '', ''}, policy, true)
  elseif kind == 'x' or job.b[CANCEL] == 1 then
    note_attempt(job, 'cancelled')
    cancel(job, kind == 'x' and data[1] ~= '' and data[1] or 'cancelled', true)
    if kind ~= 'x' then incident(job, 'cancelled') end -- the worker does not know of it
  else
    again(job, kind == 'r' and 'retried' or 'released', data)
  end
end

local function apply_outcome(i, id, st)
  local at = first + 4 * (i - 1)
  local kind, data = ARGV[at], ARGV[at + 3]
  local is_plain = st and has_no_dependents and not is_bounded and sub(st, 1, 1) == ACTIVE and (kind == 'c' or kind == 'n')
  local blob = not seen[id] and holds(st, ARGV[at + 2]) and (is_plain or call('HGET', JOBS, id))
  accepted[i] = blob and '1' or '0'
  if not blob then return end
  seen[id] = true
  if is_plain then
    complete_plain(id, st, KEYS[FIXED + i], kind == 'c' and data)
  else
    apply(i, parse(id, blob, st), kind, data)
  end
end

if outcomes > 0 then
  keep.batch_counts()
  local ids = {}
  for i = 1, outcomes do ids[i] = ARGV[first + 4 * i - 3] end
  local sts = call('HMGET', ST, unpack(ids))
  for i = 1, outcomes do apply_outcome(i, ids[i], sts[i]) end
  variadic('HSET', ST, st_changes)
  st_changes = {}
  write_completed(completed)
  keep.write_counts()
end
