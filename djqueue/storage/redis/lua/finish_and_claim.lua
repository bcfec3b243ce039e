-- Finish jobs and claim the next ones in one step.
--
-- KEYS: of each outcome, the job's result.
-- ARGV: number of outcomes, worker, slots, lease, the configured rate (capacity, per) and concurrency (each '' for
--   none), the configuration of groups, the dead letter policy (ttl, retries, wait, maximum number), number of attempts
--   kept for each job, the worker's job names (MessagePack), permits that the claim has of a shared limiter and the
--   limiter's concurrency (both '' if it needs none), whether the claim has jobs of other queues ('1' or '0'), whether it
--   skips jobs with a stalled attempt ('1' or '0'); then of each outcome its kind, id, token and data.
--   Kinds: c complete with a result, n complete without one, r retry, l release, f fail, x cancel.
-- Returns {'done', a flag for each outcome, last token, milliseconds until the next job may be claimable or -1, number of
--   dead letters above the maximum, claims (id, record, counters or ''), time, weight of the next job if the permits do
--   not suffice, completed jobs with items}; to a repeated request 'again' and the ids of the claims.
--! include base rates job ready completion complete

local outcomes, worker, slots = tonumber(ARGV[ARGS]), ARGV[ARGS + 1], tonumber(ARGV[ARGS + 2])
local lease = tonumber(ARGV[ARGS + 3])
configure_groups(ARGV[ARGS + 7])
local policy = {tonumber(ARGV[ARGS + 8]), tonumber(ARGV[ARGS + 9]), ARGV[ARGS + 10]}
local max_dead = tonumber(ARGV[ARGS + 11])
keep.attempts = tonumber(ARGV[ARGS + 12])
-- permits, whole: of the shared limiter; short: the weight of the next job, if the permits do not suffice for it;
-- held: whether the next waiting job was too heavy for the free slots; holds: these, encoded, or false; held_names: the
-- names that are held now; ends: when each hold on the worker's names ends;
-- room_before: free slots before the outcomes;
-- alone: a job with a stalled attempt is claimed alone: 'taken' if this claim has one, 'later' if one is next.
local claiming = {permits = tonumber(ARGV[ARGS + 14]), whole = tonumber(ARGV[ARGS + 15]), short = 0}
local first = ARGS + 18
claiming.alone, claiming.others, claiming.skips = false, ARGV[ARGS + 16] == '1', ARGV[ARGS + 17] == '1'

local capacity, per, concurrency
do
  local overrides = call('HMGET', META, 'limited', 'capacity', 'per', 'concurrency', 'held', 'holds')
  claiming.held, claiming.holds, claiming.held_names, claiming.ends = overrides[5] == '1', overrides[6], {}, {}
  capacity, per, concurrency = limits_of(overrides, ARGV[ARGS + 4], ARGV[ARGS + 5], ARGV[ARGS + 6])
end

-- Return the free slots of the concurrency.
local function free()
  return concurrency - call('ZCARD', LEASE) - (call('HGET', META, 'e') or 0)
end
claiming.room_before = concurrency and free()

-- Apply the outcomes.

local accepted, seen, streamed = {}, {}, {}
do -- a block of its own, since only two hundred local names may exist at a time
  --! insert outcomes
end

-- Claim jobs.

-- Note that no job is too heavy any more.
local function clear_held()
  if claiming.holds then call('HSET', META, 'held', 2) else call('HDEL', META, 'held') end
end

-- Return the number of jobs in `unhandled` that are not held.
local function count_unhandled()
  local count = call('ZCARD', UNHANDLED)
  for _, name in ipairs(claiming.held_names) do
    for _, start in ipairs({name, NUL .. name}) do
      count = count - call('ZLEXCOUNT', UNHANDLED, '[' .. start .. NUL, '(' .. start .. AFTER)
    end
  end
  return count
end

local claimed, ids, base = {}, {}, ''
local wait = -1

local handled = {}
local names = decode(ARGV[ARGS + 13])
for _, one in ipairs(names) do handled[one] = true end
if claiming.holds then
  -- Jobs that are held wait like those without a handler: see control.lua.
  for _, hold in ipairs(decode(claiming.holds)) do
    local name, ends = hold[1], hold[3]
    if ends == 0 or ends > now then
      claiming.held_names[#claiming.held_names + 1] = name
      if ends > 0 and handled[name] then claiming.ends[name] = ends end
      handled[name] = nil
    end
  end
  if #claiming.held_names > 0 then
    local left = {}
    for _, one in ipairs(names) do
      if handled[one] then left[#left + 1] = one end
    end
    names = left
  else
    call('HDEL', META, 'holds')
    claiming.holds = false
    if not claiming.held then clear_held() end
  end
end

local unhandled_count = 0
local room -- free slots of the concurrency

local function mark_unhandled(id, number, blob, st)
  local job = parse(id, blob, st)
  job.mark, job.state = number, WAITING_UNHANDLED
  call('ZADD', UNHANDLED, 0, unhandled_entry(job))
  save(job) --@ nothing changes: it waits for another worker
  unhandled_count = unhandled_count + 1
end

local take
do
  --! insert taking
end

-- Return the removed jobs that may not start to their positions, from the last to the first.
local function restore(taken, from, blobs, sts)
  for i = #taken, from, -1 do
    local id, number = taken[i][1], taken[i][2]
    if blobs[i] then
      local job = parse(id, blobs[i], sts[i])
      job.mark = number
      if job.state == WAITING_UNHANDLED then
        call('ZADD', UNHANDLED, 0, unhandled_entry(job))
      elseif priority_of(job) ~= 0 then
        call('ZADD', Z, 0, priority_entry(job))
      else
        call('LPUSH', W, number .. id)
      end
    end
  end
end

local body = encode({1, 0, 0, worker, now, 0, '', '', '', '', 0, 0})
local leased, started_names = {}, {}, {}
local token = 0

local function start(id, number, blob, st)
  local name = name_of(blob)
  local extra = ''
  local weight = 1
  if not st and sub(blob, 17, 17) == 'p' then
    token = token + 1
    local n = #st_changes
    st_changes[n + 1], st_changes[n + 2] = id, ACTIVE .. pack('>I8', base + token) .. body --@ claim: waiting -> active
    note(id, ACTIVE)
  else
    local job = parse(id, blob, st)
    local b, o = job.b, job.o
    if o.ttl and b[STARTED] == 0 and b[ERROR_TYPE] == '' and job.created + o.ttl <= now then
      add('n:' .. name, -1)
      job.mark = number
      leave_group_ready(job)
      bury(job, REASONS.TTL_EXPIRED, keep.TTL_EXPIRED, policy) --@ expire: waiting -> failed
      incident(job, 'failed')
      return
    end
    if b[STALLS] > 0 and claiming.skips then
      mark_unhandled(id, number, blob, st)
      return
    end
    if b[STALLS] > 0 and (token > 0 or claiming.others) then
      claiming.alone = 'later'
      return true
    end
    weight = weight_of(job)
    if room and math.min(weight, concurrency) > room then return true end
    if claiming.permits and math.min(weight, claiming.whole) > claiming.permits then
      claiming.short = weight
      return true
    end
    if b[STALLS] > 0 then claiming.alone = 'taken' end
    if room then room = room - weight + 1 end
    add('e', weight - 1)
    if o.ttl then call('ZREM', TTL, id) end
    if group_of(job) then
      job.mark = number
      claim_in_group(job)
    end
    token = token + 1
    b[ATTEMPTS], b[WORKER], b[STARTED], b[CANCEL] = b[ATTEMPTS] + 1, worker, now, 0
    job.state, job.mark = ACTIVE, pack('>I8', base + token)
    save(job) --@ claim: waiting -> active
    extra = encode({b[ATTEMPTS], b[FAILURES], b[STALLS], b[RUN_AT]})
  end
  if room then room = room - 1 end
  if claiming.permits then claiming.permits = claiming.permits - weight end
  started_names[name] = (started_names[name] or 0) + 1
  local n, l = #claimed, #leased
  claimed[n + 1], claimed[n + 2], claimed[n + 3] = id, blob, extra
  leased[l + 1], leased[l + 2] = now + lease, id
  ids[#ids + 1] = id
  if watching then emit_event(id, name, 'started', 'active') end
end

-- Take up to `limit` waiting jobs; return them, their records and their state entries. All are taken before one starts:
-- the next job of its group, which is then ready, would take the place of another one.
local function take_handled(limit)
  local found, blobs, sts = {}, {}, {}
  repeat
    local taken, unhandled, wanted = take(limit - #found), 0, {}
    if #taken == 0 then break end
    for i = 1, #taken do wanted[i] = taken[i][1] end
    local records, states = call('HMGET', JOBS, unpack(wanted)), call('HMGET', ST, unpack(wanted))
    for i = 1, #taken do
      if records[i] and not handled[name_of(records[i])] then
        unhandled = unhandled + 1
        mark_unhandled(taken[i][1], taken[i][2], records[i], states[i])
      else
        local n = #found + 1
        found[n], blobs[n], sts[n] = taken[i], records[i], states[i]
      end
    end
  until unhandled == 0 or unhandled_count >= 1000
  return found, blobs, sts
end

local function claim()
  if call('EXISTS', JOBS) == 0 or call('HEXISTS', META, 'paused') == 1 then return end
  local were_woken = woken
  promote_due(1000)
  local parts
  local allowed = slots
  if capacity then
    local bucket = call('HMGET', META, 'bucket', 'parts', 'filled')
    parts = parts_of(capacity, per, bucket[1], bucket[2], bucket[3])
    allowed = math.min(allowed, floor(parts / per))
  end
  if concurrency then
    room = free()
    allowed = math.min(allowed, room)
  end
  if allowed > 0 then
    base = next_numbers('token', allowed) - 1
    local rounds = 0
    local too_heavy = false
    local function is_full()
      return room and room <= 0 or claiming.permits and claiming.permits <= 0
    end
    while token < allowed and unhandled_count < 1000 and not too_heavy and not claiming.alone and not is_full() do
      local taken, blobs, sts = take_handled(allowed - token)
      if #taken == 0 then
        if call('LLEN', W) == 0 and call('ZCARD', Z) == 0 then break end
        rounds = rounds + 1
        if rounds > 3 then break end
      else
        for i = 1, #taken do
          local full = claiming.alone == 'taken' or is_full()
          too_heavy = not full and blobs[i] and start(taken[i][1], taken[i][2], blobs[i], sts[i])
          if full or too_heavy then
            restore(taken, i, blobs, sts)
            break
          end
        end
      end
    end
    if too_heavy and claiming.alone ~= 'later' then
      if not claiming.held and claiming.short == 0 then call('HSET', META, 'held', 1) end
    elseif claiming.held and token > 0 and count_unhandled() == 0 then
      clear_held()
    end
    variadic('HSET', ST, st_changes)
    variadic('ZADD', LEASE, leased)
    for name, limit in pairs(started_names) do add('n:' .. name, -limit) end
    if parts then store_bucket(META, 'bucket', capacity, per, parts - token * per) end
  end
  woken = were_woken or woken and call('LLEN', W) + call('ZCARD', Z) + call('ZCARD', UNHANDLED) > 0
  if parts then
    local has = false
    for _, name in ipairs(names) do
      has = has or call('HEXISTS', META, 'n:' .. name) == 1
    end
    local missing = per - (parts - token * per)
    if has and missing > 0 then wait = math.ceil(missing / capacity) end
  end
  local due = call('ZRANGE', DUE, 0, 0, 'WITHSCORES')
  if due[2] then
    local left = math.max(0, tonumber(due[2]) - now)
    if wait < 0 or left < wait then wait = left end
  end
  for name, ends in pairs(claiming.ends) do
    local left = ends - now
    if (wait < 0 or left < wait) and call('HEXISTS', META, 'n:' .. name) == 1 then wait = left end
  end
  if unhandled_count >= 1000 or claiming.alone == 'later' then wait = 0 end
end

if slots > 0 then claim() end
-- Workers that found too few free slots learn of those that are free now.
if next(seen) and concurrency and (claiming.room_before <= 0 or claiming.held) and free() > 0 then
  local left = call('LLEN', W) + call('ZCARD', Z) + count_unhandled()
  woken = woken or left > 0
  if left == 0 then clear_held() end
end

local function reply(word, claims)
  local last = base ~= '' and string.format('%.0f', base) or '0'
  local overflow = math.max(0, call('ZCARD', DEAD) - max_dead)
  return {word, table.concat(accepted), last, wait, overflow, claims, string.format('%.0f', now), claiming.short, streamed}
end
unchanged = #accepted == 0 and #claimed == 0 and #changed == 0 and not has_moved
return answer(reply('done', claimed), reply('again', ids))
