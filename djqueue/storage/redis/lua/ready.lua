-- The structures in which pending jobs wait. A job is in one of them; `group_ready` lists it a second time.
--
-- w              list of (number .. id): priority 0, in ascending order; '' where a job was removed
-- z              sorted set with equal scores: (priority, reversed .. number .. id) of other priorities
-- unhandled      the same after (name .. NUL): jobs that a worker found and has no handler for; after (NUL .. name ..
--                NUL): jobs with a stalled attempt, of any priority, so that a claim can skip them
-- due            ids of delayed jobs by time; NUL .. group of groups that pause until their rate allows more
-- group_waiting  group .. NUL .. number .. id: jobs held back by their group
-- group_ready    the same of those in w, z or unhandled
-- group_active   number of active jobs by group
-- groups         overrides by group, under '' for all groups: 1 if paused .. limit / capacity / per / weight
-- rates          capacity / per .. NUL .. group by the time at which the bucket is full; full buckets are not listed
-- unmet          id .. NUL .. queue .. NUL .. id of a dependency; the last two are empty for the active job with the
--                same unique key
-- ttl            ids by the time at which they expire
--! keys w z unhandled due group_waiting group_ready group_active groups rates unmet ttl

local group_limit = 1 -- 0: groups hold no job back

local function next_number(front)
  if not front then
    return next_numbers('rear', 1)
  end
  local number = call('HINCRBY', META, 'front', -1)
  if number == -1 then
    number = FRONT
    call('HSET', META, 'front', string.format('%.0f', number))
  end
  return number
end

local function priority_of(job)
  return job.o.priority or 0
end

local function priority_entry(job)
  return pack('>I4', PRIORITY_BASE - priority_of(job)) .. job.mark .. job.id
end

local function group_of(job)
  return group_limit > 0 and job.o.concurrency_key
end

local function group_entry(job)
  return job.o.concurrency_key .. NUL .. job.mark .. job.id
end

local function unhandled_entry(job)
  return (job.b[STALLS] > 0 and NUL or '') .. job.name .. NUL .. priority_entry(job)
end

-- Make a job claimable.
local function make_ready(job, front)
  job.mark = pack('>I8', next_number(front))
  job.state = WAITING
  if job.b[STALLS] > 0 then
    job.state = WAITING_UNHANDLED
    call('ZADD', UNHANDLED, 0, unhandled_entry(job))
  elseif priority_of(job) ~= 0 then
    call('ZADD', Z, 0, priority_entry(job))
  elseif front then
    call('LPUSH', W, job.mark .. job.id)
  else
    call('RPUSH', W, job.mark .. job.id)
  end
  if group_of(job) then call('ZADD', GROUP_READY, 0, group_entry(job)) end
  add('n:' .. job.name, 1)
  woken = true
end

local remove_from_list
do
  -- A binary search, since numbers ascend. Nil if there are too many holes around the entry.
  local PROBES = 64
  local function index_of(entry)
    local wanted = unpack_number('>I8', entry)
    local low, high = 0, call('LLEN', W) - 1
    while low <= high do
      local middle = floor((low + high) / 2)
      local at, there = middle, call('LINDEX', W, middle)
      while there == '' and at < high and at - middle < PROBES do
        at = at + 1
        there = call('LINDEX', W, at)
      end
      if there == '' then
        if at < high then return nil end
        high = middle - 1
      else
        local number = unpack_number('>I8', there)
        if number == wanted then return at end
        if number < wanted then low = at + 1 else high = middle - 1 end
      end
    end
    return nil
  end

  function remove_from_list(entry)
    local index = index_of(entry)
    if not index then
      call('LREM', W, 1, entry)
      return
    end
    call('LSET', W, index, '')
    local holes, length = call('HINCRBY', META, 'holes', 1), call('LLEN', W)
    if holes >= 64 and holes * 5 > length then
      call('HINCRBY', META, 'holes', -call('LREM', W, 1000, ''))
    end
  end
end

local function remove_from_ready(job)
  if job.state == WAITING_UNHANDLED then
    call('ZREM', UNHANDLED, unhandled_entry(job))
  elseif priority_of(job) ~= 0 then
    call('ZREM', Z, priority_entry(job))
  else
    remove_from_list(job.mark .. job.id)
  end
  add('n:' .. job.name, -1)
end

-- Remove a job from the claimable ones if it is one of them, before it becomes claimable again.
local function unready(job)
  if job.state ~= WAITING and job.state ~= WAITING_UNHANDLED then return false end
  remove_from_ready(job)
  if group_of(job) then call('ZREM', GROUP_READY, group_entry(job)) end
  return true
end

-- Groups. As many jobs of each group are ready as its weight says, if its limit and rate allow. When one is claimed, the
-- group's next job becomes ready behind all others: groups take turns, and a claim never finds a job that may not start.
local configure_groups, change_active, advance_group, wait_in_group, leave_group_waiting, is_held_back, claim_in_group, leave_group, leave_group_ready, regroup
do
  -- The configuration of all groups, and the rules of those that were looked up.
  local default_rate, weights, known = false, {}, {}

  -- settings: the limit, or (MessagePack) the limit, the rate (capacity, per) or false, and the weights by group.
  function configure_groups(settings)
    group_limit = tonumber(settings)
    if not group_limit then
      group_limit, default_rate, weights = unpack(decode(settings))
    end
  end

  local function rules_of(group)
    local rules = known[group]
    if rules then return rules end
    rules = {limit = group_limit, weight = weights[group] or 1}
    if default_rate then rules.capacity, rules.per = default_rate[1], default_rate[2] end
    local rows = call('HMGET', GROUPS, '', group)
    for i = 1, 2 do
      if rows[i] then
        local paused, limit, capacity, per, weight = string.match(rows[i], GROUP_RULES)
        rules.paused = paused == '1'
        rules.limit = tonumber(limit) or rules.limit
        rules.weight = tonumber(weight) or rules.weight
        if capacity ~= '' then rules.capacity, rules.per = tonumber(capacity), tonumber(per) end
      end
    end
    known[group] = rules
    return rules
  end

  -- Return the milliseconds until a group's bucket is full, and the bucket's name. More than an empty bucket needs can
  -- only be missing if the clock was set back.
  local function missing_of(group, rules)
    local name = rules.capacity .. '/' .. rules.per .. NUL .. group
    local full_at = tonumber(call('ZSCORE', RATES, name) or 0)
    if full_at > now + rules.per + 1 then
      full_at = now + rules.per
      call('ZADD', RATES, full_at, name)
    end
    return math.max(0, full_at - now), name
  end

  local function take_token(group)
    local rules = rules_of(group)
    if rules.capacity then
      local missing, name = missing_of(group, rules)
      call('ZADD', RATES, string.format('%.17g', now + missing + rules.per / rules.capacity), name)
    end
  end

  function change_active(group, number)
    if call('HINCRBY', GROUP_ACTIVE, group, number) <= 0 then
      call('HDEL', GROUP_ACTIVE, group)
    end
  end

  local function range_of(group)
    return '[' .. group .. NUL, '(' .. group .. AFTER
  end

  local function ready_of(group)
    return call('ZLEXCOUNT', GROUP_READY, range_of(group))
  end

  local function waiting_of(group, limit)
    local first, last = range_of(group)
    return call('ZRANGEBYLEX', GROUP_WAITING, first, last, 'LIMIT', 0, limit)
  end

  -- Return how many jobs of a group may be ready by its limit.
  local function slots_of(group, rules)
    if rules.paused then return 0 end
    return rules.limit - (call('HGET', GROUP_ACTIVE, group) or 0)
  end

  -- Times have fractions of milliseconds, which are not exact.
  local NEARLY = 0.0001

  -- Return how many jobs of a group may be ready such that all of them may start.
  local function room_of(group, rules)
    local room = slots_of(group, rules)
    if rules.capacity and room > 0 then
      local tokens = rules.capacity - missing_of(group, rules) * rules.capacity / rules.per
      return math.min(room, floor(tokens + NEARLY))
    end
    return room
  end

  -- Pause a group until its rate allows more, if only the rate holds its next job back.
  local function note_rate_pause(group, rules, ready)
    if not rules.capacity then return end
    local entry = NUL .. group
    if ready < math.min(rules.weight, slots_of(group, rules), rules.capacity) and waiting_of(group, 1)[1] then
      local wait = missing_of(group, rules) - (rules.capacity - ready - 1) * rules.per / rules.capacity
      local at = math.ceil(now + wait - NEARLY)
      -- A group whose pause is over already keeps its turn until it continues.
      local added = at > now and call('ZADD', DUE, at, entry) or at <= now and call('ZADD', DUE, 'LT', now, entry)
      if added == 1 then
        add('r', 1)
        woken = true -- workers may be waiting for a later time
      end
    elseif call('ZREM', DUE, entry) == 1 then
      add('r', -1)
    end
  end

  function advance_group(group)
    local rules, ready = rules_of(group), ready_of(group)
    if ready < rules.weight then
      local room = math.min(rules.weight, room_of(group, rules)) - ready
      for _, entry in ipairs(room > 0 and waiting_of(group, room) or {}) do
        call('ZREM', GROUP_WAITING, entry)
        add('p', -1)
        local job = load(sub(entry, #group + 10))
        make_ready(job)
        save(job) --@ nothing changes: it waits either way
        ready = ready + 1
      end
    end
    note_rate_pause(group, rules, ready)
  end

  function wait_in_group(job, front)
    job.mark = pack('>I8', next_number(front))
    job.state = WAITING_IN_GROUP
    call('ZADD', GROUP_WAITING, 0, group_entry(job))
    add('p', 1)
    local rules = rules_of(job.o.concurrency_key)
    if rules.capacity then note_rate_pause(job.o.concurrency_key, rules, ready_of(job.o.concurrency_key)) end
  end

  function leave_group_waiting(job)
    call('ZREM', GROUP_WAITING, group_entry(job))
    add('p', -1)
    local rules = rules_of(job.o.concurrency_key)
    if rules.capacity then note_rate_pause(job.o.concurrency_key, rules, ready_of(job.o.concurrency_key)) end
  end

  -- Return whether no other job of a group may be ready. is_first: it goes before the group's waiting jobs.
  function is_held_back(group, is_first)
    local rules, ready = rules_of(group), ready_of(group)
    if not is_first and (ready >= rules.weight or rules.capacity and waiting_of(group, 1)[1]) then return true end
    return room_of(group, rules) <= ready
  end

  -- Count a ready job as active.
  function claim_in_group(job)
    change_active(job.o.concurrency_key, 1)
    take_token(job.o.concurrency_key)
    leave_group_ready(job)
  end

  -- Remove a job from the group's active ones.
  function leave_group(job)
    local group = group_of(job)
    if group then
      change_active(group, -1)
      advance_group(group)
    end
  end

  -- Remove a job from the group's ready ones.
  function leave_group_ready(job)
    if group_of(job) then
      call('ZREM', GROUP_READY, group_entry(job))
      advance_group(job.o.concurrency_key)
    end
  end

  -- Apply changed rules of a group: jobs that may no longer be ready are held back again, the last one first.
  function regroup(group)
    local heads, room = call('ZRANGEBYLEX', GROUP_READY, range_of(group)), math.max(0, room_of(group, rules_of(group)))
    for i = #heads, room + 1, -1 do
      local job = load(sub(heads[i], #group + 10))
      unready(job)
      wait_in_group(job, true)
      save(job) --@ nothing changes: it waits either way
    end
    advance_group(group)
  end
end

-- Add a pending job to the structure for its dependencies, its time and its group. The caller saves it.
-- is_first: it was active, and goes before the waiting jobs of its group.
local function make_pending(job, front, is_first)
  if job.unmet then
    job.state = BLOCKED
    add('b', 1)
    return
  end
  if job.b[RUN_AT] > now then
    job.state = DELAYED
    call('ZADD', DUE, job.b[RUN_AT], job.id)
    woken = true -- workers may be waiting for a later time
    return
  end
  front = front or job.o.lifo
  local group = group_of(job)
  if group and is_held_back(group, is_first) then
    wait_in_group(job, front)
    return
  end
  make_ready(job, front)
end

local function send(queue, message)
  local number = next_numbers('sent', 1)
  has_outbox = true
  call('RPUSH', OUTBOX, encode({string.format('%.0f', number), queue, encode(message)}))
end

-- Remove a pending job from its structure.
local function leave_pending(job)
  local state = job.state
  if state == WAITING or state == WAITING_UNHANDLED then
    remove_from_ready(job)
    leave_group_ready(job)
  elseif state == WAITING_IN_GROUP then
    leave_group_waiting(job)
  elseif state == DELAYED then
    call('ZREM', DUE, job.id)
  elseif state == BLOCKED then
    call('ZREMRANGEBYLEX', UNMET, '[' .. job.id .. NUL, '(' .. job.id .. AFTER)
    add('b', -1)
  end
end

-- Return whether a sorted set has entries that begin with an id.
local function has_entries(key, id)
  return #call('ZRANGEBYLEX', key, '[' .. id .. NUL, '(' .. id .. AFTER, 'LIMIT', 0, 1) > 0
end

local function unblock(job)
  add('b', -1)
  make_pending(job)
  save(job) --@ unblock: blocked -> waiting|delayed
  woken = true
  emit_event(job.id, job.name, 'unblocked', NAMES[job.state])
end

-- Remove one dependency that a blocked job waits for.
local function dependency_met(job, queue, id)
  call('ZREM', UNMET, job.id .. NUL .. queue .. NUL .. id)
  if not has_entries(UNMET, job.id) then unblock(job) end
end

-- Make an active job pending again.
local function put_back(job, front)
  if front and group_of(job) and job.b[RUN_AT] <= now then
    change_active(job.o.concurrency_key, -1) -- the group's next job must not overtake it
    make_pending(job, front, true)
  else
    leave_group(job)
    make_pending(job, front)
  end
end

local function promote_due(limit)
  local due, rested = call('ZRANGEBYSCORE', DUE, '-inf', now, 'LIMIT', 0, limit), 0
  has_moved = has_moved or #due > 0
  for _, id in ipairs(due) do
    call('ZREM', DUE, id)
    if sub(id, 1, 1) == NUL then
      add('r', -1)
      rested = rested + 1
      advance_group(sub(id, 2))
    else
      local job = load(id)
      if job and job.state == DELAYED then
        make_pending(job)
        save(job) --@ promote: delayed -> waiting
        emit_event(id, job.name, 'promoted', NAMES[job.state])
      end
    end
  end
  return #due - rested
end
