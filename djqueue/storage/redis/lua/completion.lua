-- How jobs end, and what is forgotten with them.
--
-- lease     id by the time at which its claim is lost     finished  id by the time at which it is forgotten
-- dead      id in the order of death                      letters   id: reason, entered, expires, retries, next retry,
--                                                                       the job's name, the error's type and message, and
--                                                                       (queue, id) of dependencies that had not completed
-- again     id by the time of its next retry by itself    uniq      key: free at (8) .. number (8) .. id; NUL .. key: see wait_behind
-- uniqttl   key by the time at which it is free           deps      id .. NUL .. number .. who waits for it
-- hist      id: count (2) .. ended runs                   prog      id: progress
-- needs     ids of the live jobs that depend on others    holds     id .. NUL .. who lives and may read its record
-- about     of jobs with a subject: that .. NUL .. when it was enqueued (8) .. number (8) .. id
-- Where the queue bounds bytes, of ended jobs only:
-- sizes     id: bytes of payload and error (4) .. of the result (4)    results   id by the time at which its result goes
-- Where it keeps attempts, or log lines, for a time: details, 'h' .. id or 'l' .. id by the time at which they go.
--! keys lease finished dead letters again uniq uniqttl deps holds needs hist prog sizes results details about

-- Of records that are kept, or held. A table, as a script may have no more than two hundred locals.
local keep = {
  FOREVER = 4503599627370496, -- behind all that are forgotten by themselves: kept for ever, should there be too many
  ASK = 86400000,
  TOGETHER = 100,
  attempts = 1000, -- of a job; set by scripts whose callers know it
}

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
-- holds: they hold its record from now on; an entry without a name does, while there are others to be told.
local FAN = 500
local function fan(id, state, before, holds)
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
        if holds then call('ZADD', HOLDS, 0, id .. NUL .. sub(entry, #id + 10)) end
        send(who[1], {'ended', id, state, who[2], who[3]})
        told = told + 1
      end
    end
    if #found < FAN and told < FAN then return end
  end
  if holds then call('ZADD', HOLDS, 0, id .. NUL) end
  send('', {'fan', id, state, before or false, holds or false})
end

local function note_end(job, state)
  if job.hangs ~= false then fan(job.id, state, nil, job.hangs and job.state ~= FAILED) end
end

-- Milliseconds for which a finished job's record is kept; nil: for ever.
local function kept_for(job)
  local readable = job.o.result_ttl
  if readable == nil then readable = 3600000 end
  if readable == false or readable == cjson.null then return nil end
  return math.max(readable, job.o.retention or 0)
end

-- A job about a subject comes, with 'ZADD', or goes, with 'ZREM'.
function keep.about(command, job)
  local subject = job.o.subject
  if not subject then return end
  local entry = subject .. NUL .. pack('>I8', job.created) .. job.inc .. job.id
  if command == 'ZADD' then call('ZADD', ABOUT, 0, entry) else call('ZREM', ABOUT, entry) end
end

function keep.any(key, id)
  return #call('ZRANGEBYLEX', key, '[' .. id .. NUL, '(' .. id .. AFTER, 'LIMIT', 0, 1) > 0
end

-- The record of a job on which live jobs depend is held for them: it is not over, whatever its time, and its place in
-- `finished` is that to ask them whether they still live, should the message have been lost that says so.
function keep.is_held(job)
  if job.expires ~= 0 or job.state == FAILED then return false end
  if kept_for(job) then return true end
  local at = call('ZSCORE', FINISHED, job.id)
  return at and tonumber(at) < keep.FOREVER
end

-- How many there are of each outcome. Scripts that may have a thousand of them make it one sum, between these two.
function keep.count_together()
  keep.sums = {c = 0, x = 0}
end

function keep.counted()
  for state, number in pairs(keep.sums) do add('h' .. state, number) end
  keep.sums = nil
end

function keep.count(job, number)
  if keep.sums then
    keep.sums[job.state] = keep.sums[job.state] + number
  else
    add('h' .. job.state, number)
  end
end

-- What the queue keeps at most: 'c' and 'x', of records, 'r' of results, 'h' of attempts, 'l' of log lines (milliseconds);
-- whether it counts bytes.
function keep.bound(name)
  if not keep.bounds then
    local found = call('HMGET', META, 'age:c', 'age:x', 'age:r', 'age:h', 'age:l', 'bytes')
    keep.bounds = {}
    for at, field in ipairs({'c', 'x', 'r', 'h', 'l', 'bytes'}) do keep.bounds[field] = tonumber(found[at] or nil) end
  end
  return keep.bounds[name]
end

-- Milliseconds for which a result can be read; nil: for ever.
function keep.readable(job)
  local readable, most = job.o.result_ttl, keep.bound('r')
  if readable == nil then readable = 3600000 end
  readable = tonumber(readable)
  if most then return readable and math.min(readable, most) or most end
  return readable
end

-- What is to be known beside the record of a job that has ended. result: its size; nil: there is none.
function keep.note(job, result)
  local b = job.b
  if keep.bound('bytes') then
    local size = job.size + #b[ERROR_TYPE] + #b[ERROR_MESSAGE] + #b[ERROR_TRACEBACK]
    call('HSET', SIZES, job.id, pack('>I4I4', size, result or 0))
  end
  if keep.bound('h') and call('HEXISTS', HIST, job.id) == 1 then
    call('ZADD', DETAILS, job.finished + keep.bound('h'), 'h' .. job.id)
  end
  if keep.bound('l') then call('ZADD', DETAILS, job.finished + keep.bound('l'), 'l' .. job.id) end
  local readable = job.state == COMPLETED and keep.bound('r') and keep.readable(job)
  if readable then
    b[ITEMS], b[READABLE] = b[ITEMS] or false, job.finished + readable
  end
end

-- Bytes count with the outcome, those of results also by themselves; but not those of what is held.
function keep.weigh(job, sign)
  local kept = call('HGET', SIZES, job.id)
  if not kept then return end
  local size, result = unpack_number('>I4I4', kept)
  add('B' .. job.state, sign * size)
  add('Br', sign * result)
  if sign < 0 then
    call('ZREM', RESULTS, job.id)
  elseif result > 0 then
    call('ZADD', RESULTS, job.finished + (keep.readable(job) or keep.FOREVER), job.id)
  end
end

-- What was noted beside the record of an ended job goes with it.
function keep.forget(job, is_held)
  if not is_held then keep.weigh(job, -1) end
  call('HDEL', SIZES, job.id)
  call('ZREM', DETAILS, 'h' .. job.id, 'l' .. job.id)
end

function keep.hold(job)
  job.expires = 0
  local readable = job.b[READABLE]
  if readable then job.b[READABLE] = -math.abs(readable) end
  keep.count(job, 1)
  call('ZADD', FINISHED, now + keep.ASK, job.id)
end

-- The same to several queues about jobs of theirs, (queue, id) each: those of a queue together.
function keep.tell(keys, kind, ...)
  local found = {}
  for _, key in ipairs(keys) do
    local queue = key[1]
    local ids = found[queue] or {}
    found[queue] = ids
    ids[#ids + 1] = key[2]
    if #ids == keep.TOGETHER then
      send(queue, {kind, ids, ...})
      found[queue] = nil
    end
  end
  for queue, ids in pairs(found) do send(queue, {kind, ids, ...}) end
end

-- A job that depends on others lives no more.
function keep.release(job)
  if job.o.depends_on and call('SREM', NEEDS, job.id) == 1 then
    keep.tell(job.o.depends_on, 'unbind', job.id, job.inc, job.o.on_dependency_failure or 'fail')
  end
end

function keep.until_its_time(job, kept)
  local most = job.state ~= FAILED and keep.bound(job.state)
  if most then kept = kept and math.min(kept, most) or most end
  job.expires = kept and job.finished + kept or 0
  local readable = job.b[READABLE]
  if readable then job.b[READABLE] = math.abs(readable) end
  call('ZADD', FINISHED, kept and job.expires or keep.FOREVER + job.finished, job.id)
  keep.weigh(job, 1)
end

local function forget_at(job, kept, result)
  keep.note(job, result)
  job.hangs = keep.any(DEPS, job.id)
  if job.hangs and job.state ~= FAILED then
    keep.hold(job)
  else
    keep.until_its_time(job, kept)
  end
end

local function ended(job, in_group)
  release_key(job)
  if in_group then leave_group(job) end
  note_end(job, NAMES[job.state])
  keep.release(job)
end

-- If nobody holds a record any more its own time counts again.
function keep.let_go(id, result_key)
  if keep.any(HOLDS, id) then return end
  local job = load(id)
  if not job or not keep.is_held(job) then return end
  keep.count(job, -1)
  keep.until_its_time(job, kept_for(job))
  save(job) --@ nothing changes but how long it is kept
  local readable = job.b[READABLE] and job.b[READABLE] - job.finished or keep.readable(job)
  if readable then
    local left = job.finished + readable - now
    if left > 0 then call('PEXPIRE', result_key, left) else call('DEL', result_key) end
  end
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
  call('HINCRBY', META, 'buried', 1)
  forget_at(job, policy[1])
  local retries = b[RETRIES]
  local again = retries < policy[2] and now + wait_of(policy[3], retries + 1, job.id) or 0
  call('ZADD', DEAD, numbers('deaths', 1), job.id)
  local letter = {reason, now, job.expires, retries, again, job.name, error[1], error[2], job.lacks}
  call('HSET', LETTERS, job.id, encode(letter))
  if again ~= 0 then
    call('ZADD', AGAIN, again, job.id)
  end
  b[RETRIES] = 0
  call('ZREM', TTL, job.id)
  save(job) --@ fail: active -> failed --@ expire: waiting|delayed|blocked -> failed --@ dependency_failed: blocked -> failed
  ended(job, in_group)
  tell(job.id, job.name, 'failed', 'failed')
end

local EXPIRED = {'djqueue.core.errors.JobTimeoutError', 'the ttl expired before the job started', ''}

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
