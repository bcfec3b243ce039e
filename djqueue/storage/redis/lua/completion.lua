-- How jobs end.
--
-- lease         ids by the time at which the claim is lost
-- dead          ids in the order of failure
-- dead_letters  id: reason, failed at, expires, retries, next retry, job name, error type, error message, and (queue, id)
--               of dependencies that had not completed
-- auto_retries  ids by the time of the next automatic retry
-- hist          id: count (2) .. ended attempts
-- prog          id: progress
--! include unique dependents retention
--! keys lease dead dead_letters auto_retries hist prog

local function note_attempt(job, outcome, error)
  local b = job.b
  local run = encode({b[ATTEMPTS], b[WORKER], b[STARTED], now, outcome, error or false})
  local kept = call('HGET', HIST, job.id)
  local count, runs = 0, ''
  if kept then
    count, runs = unpack_number('>I2', kept), sub(kept, 3)
  end
  while count >= keep.attempts do
    local first = cmsgpack.unpack_one(runs)
    runs = sub(runs, first + 1)
    count = count - 1
  end
  call('HSET', HIST, job.id, pack('>I2', count + 1) .. runs .. run)
end

local function set_error(job, error)
  job.b[ERROR_TYPE], job.b[ERROR_MESSAGE], job.b[ERROR_TRACEBACK] = error[1], error[2], error[3]
end

local function clear_error(job)
  set_error(job, {'', '', ''})
end

local function after_end(job, in_group)
  release_key(job)
  if in_group then leave_group(job) end
  dependents.note_end(job, NAMES[job.state])
  dependents.release(job)
end

local function cancel(job, reason, in_group)
  job.b[REASON] = reason
  job.state, job.finished = CANCELLED, now
  set_expiry(job, keep.kept_for(job))
  add('x', 1)
  call('ZREM', TTL, job.id)
  save(job) --@ cancel: waiting|delayed|blocked|active -> cancelled
  after_end(job, in_group)
  emit_event(job.id, job.name, 'cancelled', 'cancelled')
end

-- Milliseconds before an automatic retry. rule: a number, or a backoff (kind, base, logarithm of the factor, cap,
-- jitter). A script has no random numbers: a hash of the job's id and the time takes their place.
function keep.wait_of(rule, retries, id)
  if tonumber(rule) then return tonumber(rule) end
  local kind, base, power, cap, jitter = unpack(decode(rule))
  local wait = base
  if kind == 'linear' then
    wait = base * retries
  elseif kind == 'exponential' then
    wait = base * 2 ^ math.min((retries - 1) * power, 60)
  end
  wait = math.min(wait, cap)
  local chance = tonumber(sub(redis.sha1hex(id .. now), 1, 8), 16) / 4294967296
  wait = wait + wait * jitter * (2 * chance - 1)
  return math.min(math.max(0, floor(wait + 0.5)), cap)
end

-- Make a job a dead letter. policy: ttl, number of automatic retries, wait before each.
local function bury(job, reason, error, policy, in_group)
  local b = job.b
  b[REASON] = reason
  set_error(job, error)
  job.state, job.finished = FAILED, now
  call('HINCRBY', META, 'buried', 1)
  set_expiry(job, policy[1])
  local retries = b[RETRIES]
  local next_retry = retries < policy[2] and now + keep.wait_of(policy[3], retries + 1, job.id) or 0
  call('ZADD', DEAD, next_numbers('deaths', 1), job.id)
  local dead_letter = {reason, now, job.expires, retries, next_retry, job.name, error[1], error[2], job.unmet_dependencies}
  call('HSET', DEAD_LETTERS, job.id, encode(dead_letter))
  if next_retry ~= 0 then
    call('ZADD', AUTO_RETRIES, next_retry, job.id)
  end
  b[RETRIES] = 0
  call('ZREM', TTL, job.id)
  save(job) --@ fail: active -> failed --@ expire: waiting|delayed|blocked -> failed --@ dependency_failed: blocked -> failed
  after_end(job, in_group)
  emit_event(job.id, job.name, 'failed', 'failed')
end

keep.TTL_EXPIRED = {ERRORS.JOB_TIMEOUT, 'the ttl expired before the job started', ''}

-- Report to the calling process what no worker reports: a lost attempt, or a job that failed or was cancelled.
local function incident(job, event)
  local b = job.b
  local found = {job.id, job.name, event}
  if event ~= 'stalled' then
    found[4] = b[REASON]
  end
  if event == 'failed' then
    found[5], found[6], found[7] = b[ERROR_TYPE], b[ERROR_MESSAGE], b[ERROR_TRACEBACK]
  end
  incidents[#incidents + 1] = found
end
