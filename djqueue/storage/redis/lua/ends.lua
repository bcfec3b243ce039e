-- How jobs end, and what is forgotten with them.
--
-- lease     id by the time at which its claim is lost     finished  id by the time at which it is forgotten
-- dead      id in the order of death                      letters   id: reason, entered, expires, retries, next retry,
--                                                                       the job's name, the error's type and message
-- again     id by the time of its next retry by itself    uniq      key: free at (8) .. number (8) .. id; NUL .. key: see wait_behind
-- uniqttl   key by the time at which it is free           deps      id .. NUL .. number .. who waits for it
-- hist      id: count (2) .. ended runs                   prog      id: progress
--! keys lease finished dead letters again uniq uniqttl deps hist prog

local MAX_HISTORY = 1000

local function note_attempt(job, outcome, error)
  local b = job.b
  local run = encode({b[ATTEMPTS], b[WORKER], b[STARTED], now, outcome, error or false})
  local kept = call('HGET', HIST, job.id)
  local count, runs = 0, ''
  if kept then
    count, runs = unpack_number('>I2', kept), sub(kept, 3)
  end
  if count >= MAX_HISTORY then
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

-- Unique keys.
local function owner_of(key)
  local held = call('HGET', UNIQ, key)
  if not held then return nil end
  local free_at = unpack_number('>I8', held)
  if free_at ~= 0 and free_at <= now then
    call('HDEL', UNIQ, key)
    call('ZREM', UNIQTTL, key)
    return nil
  end
  return sub(held, 17)
end

local function take_key(job)
  local key, lives = job.o.unique_key, job.o.unique_ttl
  if key then
    local free_at = lives and job.created + lives or 0
    call('HSET', UNIQ, key, pack('>I8', free_at) .. job.inc .. job.id)
    if lives then
      call('ZADD', UNIQTTL, free_at, key)
    else
      call('ZREM', UNIQTTL, key)
    end
  end
end

-- The job that waits for the end of the active one with a key: the numbers of both (8, 8) .. its id.
local function wait_behind(job, owner)
  call('HSET', UNIQ, NUL .. job.o.unique_key, owner.inc .. job.inc .. job.id)
  call('ZADD', UNMET, 0, job.id .. NUL .. NUL)
  job.unmet = true
end

local function follower(key)
  local next = call('HGET', UNIQ, NUL .. key)
  return next and load(sub(next, 17))
end

local function is_followed(job)
  local key = job.o.unique_key
  local next = key and call('HGET', UNIQ, NUL .. key)
  return next and sub(next, 1, 8) == job.inc
end

local function release_key(job)
  local key = job.o.unique_key
  if not key then return end
  local found = call('HMGET', UNIQ, key, NUL .. key)
  local held, next = found[1], found[2]
  if held and sub(held, 9, 16) == job.inc and sub(held, 17) == job.id then
    call('HDEL', UNIQ, key)
    call('ZREM', UNIQTTL, key)
  end
  if next and sub(next, 9, 16) == job.inc then
    call('HDEL', UNIQ, NUL .. key)
  elseif next and sub(next, 1, 8) == job.inc then
    call('HDEL', UNIQ, NUL .. key)
    local successor = load(sub(next, 17))
    if successor and successor.state == BLOCKED then
      if not owner_of(key) then take_key(successor) end
      met(successor, '', '')
    end
  end
end

-- Tell up to so many of those that wait for a job of its end, by way of the outbox; the rest with another message.
-- before: those that came later do not mean this end.
local FAN = 500
local function fan(id, state, before)
  local kept, told = 0, 0
  while told < FAN do
    local found = call('ZRANGEBYLEX', DEPS, '[' .. id .. NUL, '(' .. id .. AFTER, 'LIMIT', kept, FAN)
    if #found == 0 then return end
    for _, entry in ipairs(found) do
      local who = decode(sub(entry, #id + 10))
      local later = before and unpack_number('>I8', entry, #id + 2) > before
      if later or state == 'failed' and who[4] == 'wait' then
        kept = kept + 1
      elseif told < FAN then
        call('ZREM', DEPS, entry)
        send(who[1], {'ended', id, state, who[2], who[3]})
        told = told + 1
      end
    end
  end
  send('', {'fan', id, state, before})
end

local function note_end(job, state)
  fan(job.id, state)
end

-- Behind all that are forgotten by themselves are those that are kept for ever, should there be too many.
local FOREVER = 4503599627370496

local function forget_at(job, kept)
  local most = job.state ~= FAILED and tonumber(call('HGET', META, 'age:' .. job.state) or nil)
  if most then kept = kept and math.min(kept, most) or most end
  job.expires = kept and now + kept or 0
  call('ZADD', FINISHED, kept and job.expires or FOREVER + now, job.id)
end

-- Milliseconds for which a finished job's record is kept; nil: for ever.
local function kept_for(job)
  local readable = job.o.result_ttl
  if readable == nil then readable = 3600000 end
  if readable == false or readable == cjson.null then return nil end
  return math.max(readable, job.o.retention or 0)
end

local function ended(job, in_group)
  release_key(job)
  if in_group then leave_group(job) end
  note_end(job, NAMES[job.state])
end

local function cancel(job, reason, in_group)
  job.b[REASON] = reason
  job.state, job.finished = CANCELLED, now
  forget_at(job, kept_for(job))
  add('x', 1)
  call('ZREM', TTL, job.id)
  save(job) --@ cancel: waiting|delayed|blocked|active -> cancelled
  ended(job, in_group)
  tell(job.id, job.name, 'cancelled', 'cancelled')
end

-- Milliseconds before a retry by itself: as many, or a backoff (kind, base, factor's logarithm, cap, jitter). Chance
-- is made of the job's id and the time, as a script has no other.
local function wait_of(rule, retries, id)
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

-- policy: dead letters' ttl, retries by themselves, and the wait before each.
local function bury(job, reason, error, policy, in_group)
  local b = job.b
  b[REASON] = reason
  set_error(job, error)
  job.state, job.finished = FAILED, now
  forget_at(job, policy[1])
  local retries = b[RETRIES]
  local again = retries < policy[2] and now + wait_of(policy[3], retries + 1, job.id) or 0
  call('ZADD', DEAD, numbers('deaths', 1), job.id)
  call('HSET', LETTERS, job.id, encode({reason, now, job.expires, retries, again, job.name, error[1], error[2]}))
  if again ~= 0 then
    call('ZADD', AGAIN, again, job.id)
  end
  b[RETRIES] = 0
  call('ZREM', TTL, job.id)
  save(job) --@ fail: active -> failed --@ expire: waiting|delayed|blocked -> failed --@ dependency_failed: blocked -> failed
  ended(job, in_group)
  tell(job.id, job.name, 'failed', 'failed')
end

local function take_letter(id)
  call('ZREM', DEAD, id)
  call('HDEL', LETTERS, id)
  call('ZREM', AGAIN, id)
  call('ZREM', FINISHED, id)
end

local function revive(job, retries)
  take_letter(job.id)
  local b = job.b
  b[FAILURES], b[STALLS], b[REASON], b[WORKER] = 0, 0, '', ''
  b[RUN_AT], b[RETRIES] = now, retries
  job.finished, job.expires = nil, nil
  take_key(job)
  place(job)
  save(job) --@ retry_dead: failed -> waiting
  tell(job.id, job.name, 'retried', NAMES[job.state])
end

-- Forget a job that is not active. keys: of its result and of its log lines.
local function remove(job, result_key, log_key, keeps_dependents)
  local state = job.state
  local over = is_over(job)
  if state == FAILED then
    take_letter(job.id)
    if not keeps_dependents then note_end(job, 'cancelled') end
  elseif ENDED[state] then
    call('ZREM', FINISHED, job.id)
    add(state, -1)
  else
    displace(job)
    release_key(job)
    call('ZREM', TTL, job.id)
    if not keeps_dependents then note_end(job, 'cancelled') end
  end
  call('HDEL', JOBS, job.id)
  call('HDEL', ST, job.id)
  call('HDEL', HIST, job.id)
  call('HDEL', PROG, job.id)
  call('DEL', result_key, log_key)
  note(job.id)
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

local EXPIRED = {'djqueue.core.errors.JobTimeoutError', 'its ttl was over before it started', ''}

-- What no worker has told, for the process whose call this is: a run lost, a job failed or cancelled.
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
