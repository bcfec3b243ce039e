-- How jobs end, and what is kept of them.
--
-- lease         ids by the time at which the claim is lost    finished  ids by the time at which the record expires
-- dead          ids in the order of failure                   uniq      key: free at (8) .. number (8) .. id; for
-- auto_retries  ids by the time of the next automatic retry             NUL .. key see wait_behind
-- uniqttl       keys by the time at which they are free       deps      id .. NUL .. number .. its dependent
-- hist          id: count (2) .. ended attempts               prog      id: progress
-- needs         ids of live jobs that depend on others        holds     id .. NUL .. a live job that may read its record
-- about         of jobs with a subject: subject .. NUL .. enqueued at (8) .. number (8) .. id
-- dead_letters  id: reason, failed at, expires, retries, next retry, job name, error type, error message, and (queue, id)
--               of dependencies that had not completed
--
-- If the queue bounds bytes, of ended jobs:
-- sizes         id: bytes of payload and error (4) .. of the result (4)
-- results       ids by the time at which the result expires
-- If it bounds the age of attempts or log lines:
-- details       'h' .. id (attempts) or 'l' .. id (log lines) by the time at which they expire
--! keys lease finished dead dead_letters auto_retries uniq uniqttl deps holds needs hist prog sizes results details about

-- Functions for records that are kept or held; one table, since a script may have only two hundred local names.
local keep = {
  IDS_PER_MESSAGE = 100,
  NOTIFIED_AT_ONCE = 500,
  attempts = 1000, -- of each job; set by scripts whose callers know it
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

-- Return the id of the job that holds a unique key, or nil.
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

-- Let a job wait for the end of the active job with its key. Stored: the numbers of both (8, 8) .. the waiting job's id.
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
      dependency_met(successor, '', '')
    end
  end
end

-- Pass up to NOTIFIED_AT_ONCE dependents of a job to `notify`, and remove them; it returns false to skip one.
-- before: only dependents with at most this number. Returns whether some may be left.
function keep.each_dependent(id, before, notify)
  local kept, notified = 0, 0
  while notified < keep.NOTIFIED_AT_ONCE do
    local found = call('ZRANGEBYLEX', DEPS, '[' .. id .. NUL, '(' .. id .. AFTER, 'LIMIT', kept, keep.NOTIFIED_AT_ONCE)
    if #found == 0 then return false end
    for _, entry in ipairs(found) do
      local dependent = sub(entry, #id + 10)
      if notified < keep.NOTIFIED_AT_ONCE then
        local is_later = before and unpack_number('>I8', entry, #id + 2) > before
        if is_later or notify(decode(dependent), dependent) == false then
          kept = kept + 1
        else
          call('ZREM', DEPS, entry)
          notified = notified + 1
        end
      end
    end
    if #found < keep.NOTIFIED_AT_ONCE and notified < keep.NOTIFIED_AT_ONCE then return false end
  end
  return true
end

-- Send a job's end to its dependents through the outbox; if there are too many, the rest with another message.
-- before: dependents with a higher number do not mean this end.
-- holds: they hold its record from now on. An entry without a name holds it as long as some are left to be notified.
local function notify_dependents(id, state, before, holds)
  local function notify(who, dependent)
    if state == 'failed' and who[4] == 'wait' then return false end
    if holds then call('ZADD', HOLDS, 0, id .. NUL .. dependent) end
    send(who[1], {'ended', id, state, who[2], who[3]})
  end
  if not keep.each_dependent(id, before, notify) then return end
  if holds then call('ZADD', HOLDS, 0, id .. NUL) end
  send('', {'fan', id, state, before or false, holds or false})
end

local function note_end(job, state)
  if job.has_dependents ~= false then notify_dependents(job.id, state, nil, job.has_dependents and job.state ~= FAILED) end
end

-- Milliseconds for which the record of an ended job is kept; nil: forever.
function keep.kept_for(job)
  local ttl = result_ttl_of(job)
  return ttl and math.max(ttl, job.o.retention or 0)
end

-- Add ('ZADD') or remove ('ZREM') a job's entry under its subject.
function keep.index_subject(command, job)
  local subject = job.o.subject
  if not subject then return end
  local entry = subject .. NUL .. pack('>I8', job.created) .. job.inc .. job.id
  if command == 'ZADD' then call('ZADD', ABOUT, 0, entry) else call('ZREM', ABOUT, entry) end
end

-- Return whether the record of a job is held for live dependents. It does not expire then, and its score in `finished`
-- is the time to check whether they still live, in case the message about that was lost.
function keep.is_held(job)
  if job.expires ~= 0 or job.state == FAILED then return false end
  if keep.kept_for(job) then return true end
  local at = call('ZSCORE', FINISHED, job.id)
  return at and tonumber(at) < FOREVER
end

-- Count held records by outcome. Between `batch_counts` and `write_counts` a script sums up the changes.
function keep.batch_counts()
  keep.sums = {c = 0, x = 0}
end

function keep.write_counts()
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

-- Return a bound of the queue: maximum age of records ('c', 'x'), results ('r'), attempts ('h') or log lines ('l') in
-- milliseconds, or whether it counts bytes ('bytes').
function keep.bound(name)
  if not keep.bounds then
    local found = call('HMGET', META, 'age:c', 'age:x', 'age:r', 'age:h', 'age:l', 'bytes')
    keep.bounds = {}
    for at, field in ipairs({'c', 'x', 'r', 'h', 'l', 'bytes'}) do keep.bounds[field] = tonumber(found[at] or nil) end
  end
  return keep.bounds[name]
end

-- Milliseconds for which a result can be read in this queue; nil: forever.
function keep.readable_for(job)
  local readable, limit = result_ttl_of(job), keep.bound('r')
  if limit then return readable and math.min(readable, limit) or limit end
  return readable
end

-- Note when the details of an ended job expire, and how large they are. result: its size; nil: there is none.
function keep.note_details(job, result)
  local b = job.b
  if keep.bound('bytes') then
    local size = job.size + #b[ERROR_TYPE] + #b[ERROR_MESSAGE] + #b[ERROR_TRACEBACK]
    call('HSET', SIZES, job.id, pack('>I4I4', size, result or 0))
  end
  if keep.bound('h') and call('HEXISTS', HIST, job.id) == 1 then
    call('ZADD', DETAILS, job.finished + keep.bound('h'), 'h' .. job.id)
  end
  if keep.bound('l') then call('ZADD', DETAILS, job.finished + keep.bound('l'), 'l' .. job.id) end
  local readable_for = job.state == COMPLETED and keep.bound('r') and keep.readable_for(job)
  if readable_for then
    b[ITEMS], b[READABLE] = b[ITEMS] or false, job.finished + readable_for
  end
end

-- Count bytes by outcome, and those of results also on their own, but not those of held records.
function keep.count_bytes(job, sign)
  local kept = call('HGET', SIZES, job.id)
  if not kept then return end
  local size, result = unpack_number('>I4I4', kept)
  add('B' .. job.state, sign * size)
  add('Br', sign * result)
  if sign < 0 then
    call('ZREM', RESULTS, job.id)
  elseif result > 0 then
    call('ZADD', RESULTS, job.finished + (keep.readable_for(job) or FOREVER), job.id)
  end
end

-- Remove the notes on an ended job.
function keep.forget(job, is_held)
  if not is_held then keep.count_bytes(job, -1) end
  call('HDEL', SIZES, job.id)
  call('ZREM', DETAILS, 'h' .. job.id, 'l' .. job.id)
end

function keep.hold(job)
  job.expires = 0
  local readable_for = job.b[READABLE]
  if readable_for then job.b[READABLE] = -math.abs(readable_for) end
  keep.count(job, 1)
  call('ZADD', FINISHED, now + DAY, job.id)
end

-- Send one message to each queue of several jobs, (queue, id) each.
function keep.send_grouped(keys, kind, ...)
  local found = {}
  for _, key in ipairs(keys) do
    local queue = key[1]
    local ids = found[queue] or {}
    found[queue] = ids
    ids[#ids + 1] = key[2]
    if #ids == keep.IDS_PER_MESSAGE then
      send(queue, {kind, ids, ...})
      found[queue] = nil
    end
  end
  for queue, ids in pairs(found) do send(queue, {kind, ids, ...}) end
end

-- Let go of the records that a job needed.
function keep.release_dependencies(job)
  if job.o.depends_on and call('SREM', NEEDS, job.id) == 1 then
    keep.send_grouped(job.o.depends_on, 'unbind', job.id, job.inc, dependency_rule_of(job.o))
  end
end

function keep.expire_in(job, kept)
  local limit = job.state ~= FAILED and keep.bound(job.state)
  if limit then kept = kept and math.min(kept, limit) or limit end
  job.expires = kept and job.finished + kept or 0
  local readable_for = job.b[READABLE]
  if readable_for then job.b[READABLE] = math.abs(readable_for) end
  call('ZADD', FINISHED, kept and job.expires or FOREVER + job.finished, job.id)
  keep.count_bytes(job, 1)
end

local function set_expiry(job, kept, result)
  keep.note_details(job, result)
  job.has_dependents = has_entries(DEPS, job.id)
  if job.has_dependents and job.state ~= FAILED then
    keep.hold(job)
  else
    keep.expire_in(job, kept)
  end
end

local function after_end(job, in_group)
  release_key(job)
  if in_group then leave_group(job) end
  note_end(job, NAMES[job.state])
  keep.release_dependencies(job)
end

-- Let a record that is no longer held expire.
function keep.release_record(id, result_key)
  if has_entries(HOLDS, id) then return end
  local job = load(id)
  if not job or not keep.is_held(job) then return end
  keep.count(job, -1)
  keep.expire_in(job, keep.kept_for(job))
  save(job) --@ nothing changes but how long it is kept
  local readable_for = job.b[READABLE] and job.b[READABLE] - job.finished or keep.readable_for(job)
  if readable_for then
    local left = job.finished + readable_for - now
    if left > 0 then call('PEXPIRE', result_key, left) else call('DEL', result_key) end
  end
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
