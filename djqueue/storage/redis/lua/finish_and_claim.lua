-- End up to k runs, and claim up to n jobs in the same step.
--
-- Arguments: number of outcomes, worker, slots, lease, the rate that the settings set (capacity, per) and the
-- concurrency (each '' for none), what the settings say of groups, the dead letters' policy (ttl, retries, wait, most), how
-- many attempts a job keeps, the worker's job names (MessagePack), the permits that the claim has of a shared limiter, and
-- how many there are of those in all ('' both: it needs none), and whether the claim has jobs of other queues already
-- ('1' or '0'); then for each outcome its kind, id, token and data.
-- Keys: of each outcome, its job's result.
-- Kinds: c completes with a result, n without one; r retry, l release, f fail, x cancel.
--! include base job ready completion

local outcomes, worker, slots = tonumber(ARGV[ARGS]), ARGV[ARGS + 1], tonumber(ARGV[ARGS + 2])
local lease = tonumber(ARGV[ARGS + 3])
configure_groups(ARGV[ARGS + 7])
local policy = {tonumber(ARGV[ARGS + 8]), tonumber(ARGV[ARGS + 9]), ARGV[ARGS + 10]}
local most_dead = tonumber(ARGV[ARGS + 11])
keep.attempts = tonumber(ARGV[ARGS + 12])
-- Of the shared limiter; short: what the next job weighs, if that is more than the permits that are left.
local shared = {permits = tonumber(ARGV[ARGS + 14]), whole = tonumber(ARGV[ARGS + 15]), short = 0}
local first = ARGS + 18
-- A job with a stalled attempt is claimed alone: 'taken' when this claim has one, 'later' when one comes next.
shared.alone, shared.others, shared.skips = false, ARGV[ARGS + 16] == '1', ARGV[ARGS + 17] == '1'

-- The queue's own limits, set while it ran, or those of the settings. held: whether the next waiting job was
-- too heavy for what was free.
local capacity, per, concurrency, held
do
  local set = call('HMGET', META, 'limited', 'capacity', 'per', 'concurrency', 'held')
  held = set[5]
  if set[1] then
    capacity, per, concurrency = tonumber(set[2]), tonumber(set[3]), tonumber(set[4])
  else
    capacity, per, concurrency = tonumber(ARGV[ARGS + 4]), tonumber(ARGV[ARGS + 5]), tonumber(ARGV[ARGS + 6])
  end
end

-- Slots of the concurrency that are free.
local function free()
  return concurrency - call('ZCARD', LEASE) - (call('HGET', COUNT, 'e') or 0)
end
local room_before = concurrency and free()

-- Outcomes.

local accepted, seen, streamed = {}, {}, {}
do -- not indented: a block of its own, as two hundred local names may be there at a time
local plain_sets, plain_gone, plain_kept, completed = {}, {}, {}, 0
local nobody_waits = call('ZCARD', DEPS) == 0
local is_bounded = call('HEXISTS', META, 'bounds') == 1

local RESULT_TTL = 3600000
local plain_end = pack('>I8I8', now, now + RESULT_TTL)

local function complete_plain(i, id, st, kind, data)
  local n = #plain_sets
  plain_sets[n + 1] = id
  plain_sets[n + 2] = COMPLETED .. sub(st, 2, 9) .. plain_end .. sub(st, 10) --@ complete: active -> completed
  plain_gone[#plain_gone + 1] = id
  plain_kept[n + 1], plain_kept[n + 2] = now + RESULT_TTL, id
  if kind == 'c' then
    call('SET', KEYS[FIXED + i], data, 'PX', RESULT_TTL)
  end
  completed = completed + 1
  note(id, COMPLETED)
  if watching then
    tell(id, name_of(call('HGET', JOBS, id)), 'completed', 'completed')
  end
end

local function complete(i, job, kind, data)
  job.state, job.finished = COMPLETED, now
  clear_error(job)
  forget_at(job, kept_for(job), kind == 'c' and #data or nil)
  completed = completed + 1
  save(job) --@ complete: active -> completed
  if kind == 'c' then
    local readable = keep.readable(job)
    if not readable or job.hangs then
      call('SET', KEYS[FIXED + i], data)
    else
      call('SET', KEYS[FIXED + i], data, 'PX', math.max(1, readable))
    end
  end
  if job.b[ITEMS] then streamed[#streamed + 1] = job.id end
  ended(job, true)
  tell(job.id, job.name, 'completed', 'completed')
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
    cancel(job, 'replaced', true) -- of two that wait with one key the newer is kept
    return
  end
  restart(job)
  call('HINCRBY', META, outcome == 'retried' and outcome or 'otherwise', 1)
  b[WORKER] = ''
  b[RUN_AT] = now + data[1]
  put_back(job, outcome ~= 'retried')
  save(job) --@ retry: active -> waiting|delayed --@ release: active -> waiting|delayed
  woken = true
  tell(job.id, job.name, outcome == 'retried' and 'failing' or 'released', NAMES[job.state])
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
    if kind ~= 'x' then incident(job, 'cancelled') end -- of which the worker does not know
  else
    again(job, kind == 'r' and 'retried' or 'released', data)
  end
end

if outcomes > 0 then
  keep.count_together()
  local ids = {}
  for i = 1, outcomes do ids[i] = ARGV[first + 4 * i - 3] end
  local sts = call('HMGET', ST, unpack(ids))
  for i = 1, outcomes do
    local at = first + 4 * (i - 1)
    local kind, id, token, data = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
    local st = sts[i]
    if seen[id] then st = false end
    local is_plain = st and nobody_waits and not is_bounded and byte(st) == 97 and (kind == 'c' or kind == 'n')
    local blob = holds(st, token) and (is_plain or call('HGET', JOBS, id))
    if blob then
      seen[id] = true
      accepted[i] = '1'
      if is_plain then
        complete_plain(i, id, st, kind, data)
      else
        apply(i, parse(id, blob, st), kind, data)
      end
    else
      accepted[i] = '0'
    end
  end
  if completed > 0 then
    variadic('HSET', ST, plain_sets)
    variadic('ZREM', LEASE, plain_gone)
    variadic('ZADD', FINISHED, plain_kept)
    add('c', completed)
  end
  keep.counted()
end
end

-- Claims.

local claimed, ids, base = {}, {}, ''
local wait = -1

-- Parts of tokens, `per` to a token, of which a millisecond brings `capacity`.
local function bucket_of(capacity, per)
  local kept = call('HMGET', META, 'bucket', 'parts', 'filled')
  local most = capacity * per
  if kept[1] ~= capacity .. '/' .. per then
    return most
  end
  local elapsed = math.max(0, now - tonumber(kept[3]))
  return math.min(most, tonumber(kept[2]) + elapsed * capacity)
end

local function keep_bucket(capacity, per, parts)
  local number = string.format
  call('HSET', META, 'bucket', capacity .. '/' .. per, 'parts', number('%.17g', parts), 'filled', number('%.0f', now))
end

local handled = {}
local names = decode(ARGV[ARGS + 13])
for _, one in ipairs(names) do handled[one] = true end

local aside = 0
local room -- slots of the concurrency that are free

local function set_aside(id, number, blob, st)
  local job = parse(id, blob, st)
  job.mark, job.state = number, ASIDE
  call('ZADD', ASIDES, 0, aside_entry(job))
  save(job) --@ nothing changes: it waits, for another worker
  aside = aside + 1
end

-- Waiting jobs in order: {priority, number, id, the number's bytes, where it was, its line of asides, whether it ends the claim}.
local function ahead(a, b)
  if a[1] ~= b[1] then return a[1] < b[1] end
  return a[2] < b[2]
end

local function candidates(many)
  local found = {}
  local function entry(priority, packed, id, place, name)
    found[#found + 1] = {priority, unpack_number('>I8', packed), id, packed, place, name}
  end
  for _, one in ipairs(call('ZRANGE', Z, 0, many - 1)) do
    entry(unpack_number('>I4', one), sub(one, 5, 12), sub(one, 13), one)
  end
  local number = 0
  for _, one in ipairs(call('LRANGE', W, 0, many - 1)) do
    if one == '' then
      number = number + 0.5 -- a hole goes where the list has it
      found[#found + 1] = {FLIP, number, '', '', W}
    else
      entry(FLIP, sub(one, 1, 8), sub(one, 9), W)
      number = found[#found][2]
    end
  end
  local function line(name, start, limit, is_last)
    local entries = call('ZRANGEBYLEX', ASIDES, '[' .. start .. NUL, '(' .. start .. AFTER, 'LIMIT', 0, limit)
    for _, one in ipairs(entries) do
      local rest = sub(one, #start + 2)
      entry(unpack_number('>I4', rest), sub(rest, 5, 12), sub(rest, 13), one, name)
      found[#found][7] = is_last
    end
  end
  for _, name in ipairs(names) do
    if call('HEXISTS', COUNT, 'n:' .. name) == 1 then
      line(name, name, many, false)
      -- A job with a stalled attempt ends a claim.
      if not shared.skips then line(name, NUL .. name, 1, true) end
    end
  end
  table.sort(found, ahead)
  return found
end

local function drop_holes()
  while call('LINDEX', W, 0) == '' do
    call('LPOP', W)
    call('HINCRBY', META, 'holes', -1)
  end
end

-- Take up to `many` entries out of their places; those without a handler here are set aside.
local function take_in_order(many)
  local taken = {}
  while #taken < many and aside < 1000 do
    drop_holes()
    local found = candidates(many)
    if #found == 0 then break end
    for _, one in ipairs(found) do
      if #taken == many then break end
      local id, place = one[3], one[5]
      local hole = id == ''
      if place == W then
        call('LPOP', W)
      elseif one[6] then
        call('ZREM', ASIDES, place)
      else
        call('ZREM', Z, place)
      end
      if hole then
        call('HINCRBY', META, 'holes', -1)
      else
        local blob = call('HGET', JOBS, id)
        if blob and handled[name_of(blob)] then
          taken[#taken + 1] = {id, one[4]}
          if one[7] then return taken end
        elseif blob then
          set_aside(id, one[4], blob, call('HGET', ST, id))
        end
      end
    end
  end
  return taken
end

-- What was taken out and may not start goes back, from the last to the first.
local function put_in_place(taken, from, blobs, sts)
  for i = #taken, from, -1 do
    local id, number = taken[i][1], taken[i][2]
    if blobs[i] then
      local job = parse(id, blobs[i], sts[i])
      job.mark = number
      if job.state == ASIDE then
        call('ZADD', ASIDES, 0, aside_entry(job))
      elseif priority_of(job) ~= 0 then
        call('ZADD', Z, 0, member(job))
      else
        call('LPUSH', W, number .. id)
      end
    end
  end
end

local function take(many)
  if call('ZCARD', Z) > 0 or call('ZCARD', ASIDES) > 0 then
    return take_in_order(many)
  end
  local taken, holes = {}, 0
  repeat
    local entries = call('LPOP', W, many) or {}
    for i = 1, #entries do
      local one = entries[i]
      if one == '' then
        holes = holes + 1
      else
        taken[#taken + 1] = {sub(one, 9), sub(one, 1, 8)}
      end
    end
  until #taken > 0 or #entries == 0
  if holes > 0 then call('HINCRBY', META, 'holes', -holes) end
  return taken
end

local body = encode({1, 0, 0, worker, now, 0, '', '', '', '', 0, 0})
local fresh_sets, leased, started_names = {}, {}, {}
local token = 0

local function start(id, number, blob, st)
  local name = name_of(blob)
  if not handled[name] then
    set_aside(id, number, blob, st)
    return
  end
  local extra = ''
  local weight = 1
  if not st and sub(blob, 17, 17) == 'p' then
    token = token + 1
    local n = #fresh_sets
    fresh_sets[n + 1], fresh_sets[n + 2] = id, ACTIVE .. pack('>I8', base + token) .. body --@ claim: waiting -> active
    note(id, ACTIVE)
  else
    local job = parse(id, blob, st)
    local b, o = job.b, job.o
    if o.ttl and b[STARTED] == 0 and b[ERROR_TYPE] == '' and job.created + o.ttl <= now then
      add('n:' .. name, -1)
      job.mark = number
      leave_heads(job)
      bury(job, 'ttl_expired', EXPIRED, policy) --@ expire: waiting -> failed
      incident(job, 'failed')
      return
    end
    if b[STALLS] > 0 and shared.skips then
      set_aside(id, number, blob, st)
      return
    end
    if b[STALLS] > 0 and (token > 0 or shared.others) then
      shared.alone = 'later'
      return true
    end
    weight = weight_of(job)
    if room and math.min(weight, concurrency) > room then return true end
    if shared.permits and math.min(weight, shared.whole) > shared.permits then
      shared.short = weight
      return true
    end
    if b[STALLS] > 0 then shared.alone = 'taken' end
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
  if shared.permits then shared.permits = shared.permits - weight end
  started_names[name] = (started_names[name] or 0) + 1
  local n, l = #claimed, #leased
  claimed[n + 1], claimed[n + 2], claimed[n + 3] = id, blob, extra
  leased[l + 1], leased[l + 2] = now + lease, id
  ids[#ids + 1] = id
  if watching then tell(id, name, 'active', 'active') end
end

local function claim()
  if call('EXISTS', JOBS) == 0 or call('HEXISTS', META, 'paused') == 1 then return end
  local were_woken = woken
  promote_due(1000)
  local parts
  local allowed = slots
  if capacity then
    parts = bucket_of(capacity, per)
    allowed = math.min(allowed, floor(parts / per))
  end
  if concurrency then
    room = free()
    allowed = math.min(allowed, room)
  end
  if allowed > 0 then
    base = numbers('token', allowed) - 1
    local rounds = 0
    local too_heavy = false
    local function is_full()
      return room and room <= 0 or shared.permits and shared.permits <= 0
    end
    while token < allowed and aside < 1000 and not too_heavy and not shared.alone and not is_full() do
      local taken = take(allowed - token)
      if #taken == 0 then
        if call('LLEN', W) == 0 and call('ZCARD', Z) == 0 then break end
        rounds = rounds + 1
        if rounds > 3 then break end
      else
        local wanted = {}
        for i = 1, #taken do wanted[i] = taken[i][1] end
        local blobs, sts = call('HMGET', JOBS, unpack(wanted)), call('HMGET', ST, unpack(wanted))
        for i = 1, #taken do
          local full = shared.alone == 'taken' or is_full()
          too_heavy = not full and blobs[i] and start(taken[i][1], taken[i][2], blobs[i], sts[i])
          if full or too_heavy then
            put_in_place(taken, i, blobs, sts)
            break
          end
        end
      end
    end
    if too_heavy and shared.alone ~= 'later' then
      if not held and shared.short == 0 then call('HSET', META, 'held', 1) end
    elseif held and token > 0 and call('ZCARD', ASIDES) == 0 then
      call('HDEL', META, 'held')
    end
    variadic('HSET', ST, fresh_sets)
    variadic('ZADD', LEASE, leased)
    for name, many in pairs(started_names) do add('n:' .. name, -many) end
    if parts then keep_bucket(capacity, per, parts - token * per) end
  end
  woken = were_woken or woken and call('LLEN', W) + call('ZCARD', Z) + call('ZCARD', ASIDES) > 0
  if parts then
    local has = false
    for _, name in ipairs(names) do
      has = has or call('HEXISTS', COUNT, 'n:' .. name) == 1
    end
    local missing = per - (parts - token * per)
    if has and missing > 0 then wait = math.ceil(missing / capacity) end
  end
  local due = call('ZRANGE', DUE, 0, 0, 'WITHSCORES')
  if due[2] then
    local left = math.max(0, tonumber(due[2]) - now)
    if wait < 0 or left < wait then wait = left end
  end
  if aside >= 1000 or shared.alone == 'later' then wait = 0 end
end

if slots > 0 then claim() end
-- Those who found no room, or not enough, are told of what is free now.
if next(seen) and concurrency and (room_before <= 0 or held) and free() > 0 then
  local left = call('LLEN', W) + call('ZCARD', Z) + call('ZCARD', ASIDES)
  woken = woken or left > 0
  if left == 0 then call('HDEL', META, 'held') end
end

local function reply(word, found)
  local last = base ~= '' and string.format('%.0f', base) or '0'
  local overflow = math.max(0, call('ZCARD', DEAD) - most_dead)
  return {word, table.concat(accepted), last, wait, overflow, shared.short, found, streamed, string.format('%.0f', now)}
end
unchanged = #accepted == 0 and #claimed == 0 and #changed == 0 and not moved
return answer(reply('done', claimed), reply('again', ids))
