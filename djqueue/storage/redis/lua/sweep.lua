-- What time does: due jobs, lost leases, ttls, unique keys, dead letters whose retry is due.
--
-- Arguments: the lease, what the settings say of groups, the dead letters' policy (ttl, retries, wait, most), how many of
-- each at most, the workers that are alive (MessagePack), how many attempts a job keeps, how long records of completed and
-- of cancelled jobs, results, attempts and log lines are kept at most ('' each: as they say), whether bytes count, and
-- whether anything of that concerns completed jobs ('1' or ''), the lengths of buckets of metrics (see measure); and ids of
-- active jobs whose leases are to be looked at. Keys: of the buckets.
-- Answers: promoted, stalled, expired, retried, dead letters above the most, ids whose records' time is over, tokens of
-- the claims that were lost, and of what is over before its job's record 'r', 'h' or 'l' .. the id.
--! include base job ready completion removal room measure

local lease = tonumber(ARGV[ARGS])
configure_groups(ARGV[ARGS + 1])
local policy = {tonumber(ARGV[ARGS + 2]), tonumber(ARGV[ARGS + 3]), ARGV[ARGS + 4]}
local most_dead, limit = tonumber(ARGV[ARGS + 5]), tonumber(ARGV[ARGS + 6])
local alive = {}
for _, worker in ipairs(decode(ARGV[ARGS + 7])) do alive[worker] = true end

keep.attempts = tonumber(ARGV[ARGS + 8])

-- From now on: what has ended keeps its time.
local BOUNDS = {'age:c', 'age:x', 'age:r', 'age:h', 'age:l', 'bytes', 'bounds'}
do
  local there = call('HMGET', META, unpack(BOUNDS))
  for i, field in ipairs(BOUNDS) do
    local bound = ARGV[ARGS + 8 + i]
    if (there[i] or '') ~= bound and call('HEXISTS', META, 'rear') == 1 then
      if bound == '' then call('HDEL', META, field) else call('HSET', META, field, bound) end
      if bound == '' and field == 'bytes' then
        call('UNLINK', SIZES, RESULTS)
        call('HDEL', COUNT, 'Bc', 'Bx', 'Bf', 'Br')
      end
    end
  end
end

-- An active job without a lease has lost it with a part of the data: it has one from now on.
for i = ARGS + 17, #ARGV do
  local st = call('HGET', ST, ARGV[i])
  if st and holds(st, sub(st, 2, 9)) then
    call('ZADD', LEASE, 'NX', now + lease, ARGV[i])
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
-- The last to be claimed is claimed first again: a job that kills its worker soon after its start is among those. Jobs
-- of one claim keep their order.
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

-- Which attempts were lost, on which workers, and when: see core/stalls.py.
local function stalled_text(job, stalls)
  local b, listed = job.b, {}
  local function list(attempt, worker, started, ended)
    local text = 'attempt %.0f on %s, started %s, lost %s'
    listed[#listed + 1] = string.format(text, attempt, worker, utc(started), utc(ended))
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
  local most = job.o.max_stalls or 3
  if b[STALLS] >= most then
    local times = b[STALLS] + 1
    local error = {'djqueue.core.errors.StorageError', stalled_text(job, times), ''}
    note_attempt(job, 'stalled', error)
    b[STALLS] = times
    call('HINCRBY', META, 'stalled', 1)
    tell(job.id, job.name, 'stalled', 'failed')
    bury(job, alive[b[WORKER]] and 'stalled' or 'worker_lost', error, policy, true) --@ stall: active -> failed
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
  tell(job.id, job.name, 'stalled', NAMES[job.state])
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
  local is_new = job and job.b[STARTED] == 0 and job.b[ERROR_TYPE] == '' -- not one that died and was retried
  if is_new and not ENDED[job.state] and job.state ~= ACTIVE then
    displace(job)
    bury(job, 'ttl_expired', EXPIRED, policy) --@ expire: waiting|delayed|blocked -> failed
    incident(job, 'failed')
    expired = expired + 1
  end
end

for _, key in ipairs(call('ZRANGEBYSCORE', UNIQTTL, '-inf', now, 'LIMIT', 0, limit)) do
  owner_of(key)
  call('ZREM', UNIQTTL, key)
end

local retried = 0
for _, id in ipairs(call('ZRANGEBYSCORE', AGAIN, '-inf', now, 'LIMIT', 0, limit)) do
  local job = load(id)
  local kept = call('HGET', LETTERS, id)
  local letter = kept and decode(kept)
  if not job or not letter then
    call('ZREM', AGAIN, id)
  elseif not (job.o.unique_key and owner_of(job.o.unique_key)) then
    revive(job, letter[4] + 1, letter[9])
    retried = retried + 1
  else
    -- Later then: so many of these would hold up the others.
    letter[5] = now + wait_of(policy[3], letter[4] + 1, id)
    call('ZADD', AGAIN, letter[5], id)
    call('HSET', LETTERS, id, encode(letter))
    note(id, 'u')
  end
end

if watching then
  local watched = call('HGETALL', WATCH)
  for i = 1, #watched, 2 do
    if tonumber(watched[i + 1]) <= clock then call('HDEL', WATCH, watched[i]) end
  end
end

if call('EXISTS', DROPS) == 1 then tidy(limit) end

local measured = measure(decode(ARGV[ARGS + 16]), FIXED + 1)

local overflow = math.max(0, call('ZCARD', DEAD) - most_dead)
local over = call('ZRANGEBYSCORE', FINISHED, '-inf', now, 'LIMIT', 0, limit)
local unneeded = call('ZRANGEBYSCORE', DETAILS, '-inf', now, 'LIMIT', 0, limit)
for _, id in ipairs(call('ZRANGEBYSCORE', RESULTS, '-inf', now, 'LIMIT', 0, limit)) do
  unneeded[#unneeded + 1] = 'r' .. id
end
unchanged = promoted + #lost + expired + retried + #changed == 0 and not moved and not measured
return answer({promoted, #lost, expired, retried, overflow, over, tokens, unneeded})
