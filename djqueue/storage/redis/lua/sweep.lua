-- Apply what is due: delayed jobs, lost leases, expired jobs and unique keys, automatic retries of dead letters.
--
-- KEYS: buckets of metrics.
-- ARGV: the lease, the configuration of groups, the dead letter policy (ttl, retries, wait, maximum number), maximum
--   number of jobs of each kind, the live workers (MessagePack), number of attempts kept for each job, maximum age of
--   records of completed and of cancelled jobs, of results, of attempts and of log lines ('' each for none), whether
--   bytes are counted and whether any of these bounds concerns completed jobs ('1' or ''), the lengths of buckets of
--   metrics (see measure.lua); then ids of active jobs whose lease is to be checked.
-- Returns numbers of promoted, stalled, expired and retried jobs, number of dead letters above the maximum, ids of
--   expired records, tokens of lost claims, and expired details: 'r' (result), 'h' (attempts) or 'l' (log lines) .. id.
--! include base job ready completion removal room measure

local lease = tonumber(ARGV[ARGS])
configure_groups(ARGV[ARGS + 1])
local policy = {tonumber(ARGV[ARGS + 2]), tonumber(ARGV[ARGS + 3]), ARGV[ARGS + 4]}
local max_dead, limit = tonumber(ARGV[ARGS + 5]), tonumber(ARGV[ARGS + 6])
local alive = {}
for _, worker in ipairs(decode(ARGV[ARGS + 7])) do alive[worker] = true end

keep.attempts = tonumber(ARGV[ARGS + 8])

-- Store the bounds. They apply from now on: jobs that have ended keep their expiry time.
local BOUNDS = {'age:c', 'age:x', 'age:r', 'age:h', 'age:l', 'bytes', 'bounds'}
do
  local stored = call('HMGET', META, unpack(BOUNDS))
  for i, field in ipairs(BOUNDS) do
    local bound = ARGV[ARGS + 8 + i]
    if (stored[i] or '') ~= bound and call('HEXISTS', META, 'rear') == 1 then
      if bound == '' then call('HDEL', META, field) else call('HSET', META, field, bound) end
      if bound == '' and field == 'bytes' then
        call('UNLINK', SIZES, RESULTS)
        call('HDEL', META, 'Bc', 'Bx', 'Bf', 'Br')
      end
    end
  end
end

-- An active job without a lease has lost it with a part of the data: it gets a new one.
for i = ARGS + 17, #ARGV do
  local st = call('HGET', ST, ARGV[i])
  if st and holds(st, sub(st, 2, 9)) then
    call('ZADD', LEASE, 'NX', now + lease, ARGV[i])
  end
end

-- Requests that finish_and_claim_plain.lua remembers for a minute; see request.lua.
if call('HLEN', META) > 64 then
  local kept, heading = call('HGETALL', META), string.match(SEQUENCE, '^.*:sequence:')
  for i = 1, #kept, 2 do
    if sub(kept[i], 1, #heading) == heading and unpack_number('>I8', kept[i + 1], 9) < clock - MINUTE then
      call('HDEL', META, kept[i])
    end
  end
end

local lost, tokens = {}, {}
for _, id in ipairs(call('ZRANGEBYSCORE', LEASE, '-inf', now, 'LIMIT', 0, limit)) do
  call('ZREM', LEASE, id)
  local job = load(id)
  if job and job.state == ACTIVE then
    add('e', 1 - weight_of(job))
    lost[#lost + 1], tokens[#tokens + 1] = job, job.mark
  end
end
-- The job that was claimed last is claimed first again: it is the most likely one to have killed its worker. Jobs of one
-- claim keep their order.
table.sort(lost, function(a, b)
  if a.b[STARTED] ~= b.b[STARTED] then return a.b[STARTED] < b.b[STARTED] end
  return unpack_number('>I8', a.mark) > unpack_number('>I8', b.mark)
end)

local function utc(milliseconds)
  local seconds = floor(milliseconds / 1000)
  local days, rest = floor(seconds / 86400) + 719468, seconds % 86400
  local era = floor(days / 146097)
  local day = days - era * 146097
  local year = floor((day - floor(day / 1460) + floor(day / 36524) - floor(day / 146096)) / 365)
  day = day - (365 * year + floor(year / 4) - floor(year / 100))
  local month = floor((5 * day + 2) / 153)
  day = day - floor((153 * month + 2) / 5) + 1
  month = month < 10 and month + 3 or month - 9
  year = year + era * 400 + (month <= 2 and 1 or 0)
  return string.format(
    '%04d-%02d-%02d %02d:%02d:%02d UTC', year, month, day, floor(rest / 3600), floor(rest / 60) % 60, rest % 60
  )
end

-- Describe the lost attempts with their workers and times, as core/enginejob.py does.
local function stalled_text(job, stalls)
  local b, listed = job.b, {}
  local function list(attempt, worker, started, after_end)
    local text = 'attempt %.0f on %s, started %s, lost %s'
    listed[#listed + 1] = string.format(text, attempt, worker, utc(started), utc(after_end))
  end
  local kept = call('HGET', HIST, job.id)
  local at = kept and 2 or -1
  while at ~= -1 and at < #kept do
    local run
    at, run = cmsgpack.unpack_one(kept, at)
    if run[5] == 'stalled' then list(run[1], run[2], run[3], run[4]) end
  end
  list(b[ATTEMPTS], b[WORKER], b[STARTED], now)
  local lines = table.concat(listed, '; ', math.max(1, #listed - math.min(stalls, 10) + 1))
  return 'stalled ' .. stalls .. ' times, last on ' .. b[WORKER] .. ': ' .. lines
end

local function stall(job)
  local b = job.b
  if b[CANCEL] == 1 then
    call('HINCRBY', META, 'otherwise', 1)
    note_attempt(job, 'cancelled')
    cancel(job, 'cancelled', true)
    incident(job, 'cancelled')
    return
  end
  local max_stalls = job.o.max_stalls or DEFAULT.MAX_STALLS
  if b[STALLS] >= max_stalls then
    local times = b[STALLS] + 1
    local error = {ERRORS.STORAGE, stalled_text(job, times), ''}
    note_attempt(job, 'stalled', error)
    b[STALLS] = times
    call('HINCRBY', META, 'stalled', 1)
    emit_event(job.id, job.name, 'stalled', 'failed')
    bury(job, alive[b[WORKER]] and REASONS.STALLED or REASONS.WORKER_LOST, error, policy, true) --@ stall: active -> failed
    incident(job, 'stalled')
    incident(job, 'failed')
    return
  end
  note_attempt(job, 'stalled')
  b[STALLS] = b[STALLS] + 1
  if is_followed(job) then
    call('HINCRBY', META, 'otherwise', 1)
    cancel(job, 'replaced', true)
    return
  end
  restart(job)
  call('HINCRBY', META, 'stalled', 1)
  b[WORKER] = ''
  b[RUN_AT] = now
  put_back(job, true)
  save(job) --@ stall: active -> waiting
  woken = true
  emit_event(job.id, job.name, 'stalled', NAMES[job.state])
  incident(job, 'stalled')
end
for _, job in ipairs(lost) do stall(job) end
woken = woken or #lost > 0

local promoted = promote_due(limit)

local full = call('ZCOUNT', RATES, '-inf', now)
if full > 0 then call('ZREMRANGEBYRANK', RATES, 0, math.min(full, 20 * limit) - 1) end

local expired = 0
for _, id in ipairs(call('ZRANGEBYSCORE', TTL, '-inf', now, 'LIMIT', 0, limit)) do
  call('ZREM', TTL, id)
  local job = load(id)
  local is_new = job and job.b[STARTED] == 0 and job.b[ERROR_TYPE] == '' -- not a dead letter that was retried
  if is_new and not ENDED[job.state] and job.state ~= ACTIVE then
    leave_pending(job)
    bury(job, REASONS.TTL_EXPIRED, keep.TTL_EXPIRED, policy) --@ expire: waiting|delayed|blocked -> failed
    incident(job, 'failed')
    expired = expired + 1
  end
end

for _, key in ipairs(call('ZRANGEBYSCORE', UNIQTTL, '-inf', now, 'LIMIT', 0, limit)) do
  owner_of(key)
  call('ZREM', UNIQTTL, key)
end

local retried = 0
for _, id in ipairs(call('ZRANGEBYSCORE', AUTO_RETRIES, '-inf', now, 'LIMIT', 0, limit)) do
  local job = load(id)
  local kept = call('HGET', DEAD_LETTERS, id)
  local dead_letter = kept and decode(kept)
  if not job or not dead_letter then
    call('ZREM', AUTO_RETRIES, id)
  elseif not (job.o.unique_key and owner_of(job.o.unique_key)) then
    revive(job, dead_letter[4] + 1, dead_letter[9])
    retried = retried + 1
  else
    -- Postpone it, so that it does not hold up the others.
    dead_letter[5] = now + keep.wait_of(policy[3], dead_letter[4] + 1, id)
    call('ZADD', AUTO_RETRIES, dead_letter[5], id)
    call('HSET', DEAD_LETTERS, id, encode(dead_letter))
    note(id, 'u')
  end
end

if watching then
  local watched = call('HGETALL', WATCH)
  for i = 1, #watched, 2 do
    if tonumber(watched[i + 1]) <= clock then call('HDEL', WATCH, watched[i]) end
  end
end

if call('EXISTS', DROPS) == 1 then clean_drops(limit) end

local measured = measure(decode(ARGV[ARGS + 16]), FIXED + 1)

local overflow = math.max(0, call('ZCARD', DEAD) - max_dead)
local over = call('ZRANGEBYSCORE', FINISHED, '-inf', now, 'LIMIT', 0, limit)
local unneeded = call('ZRANGEBYSCORE', DETAILS, '-inf', now, 'LIMIT', 0, limit)
for _, id in ipairs(call('ZRANGEBYSCORE', RESULTS, '-inf', now, 'LIMIT', 0, limit)) do
  unneeded[#unneeded + 1] = 'r' .. id
end
unchanged = promoted + #lost + expired + retried + #changed == 0 and not has_moved and not measured
return answer({promoted, #lost, expired, retried, overflow, over, tokens, unneeded})
