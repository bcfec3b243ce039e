-- Where pending jobs wait, each place of one queue in one key.
--
-- w        list of (number .. id): priority 0, ascending numbers; '' where one was taken out
-- z        sorted set, all scores 0: (priority, reversed .. number .. id) of the other priorities
-- asides   the same, after its name and NUL: jobs for which a worker that met them has no handler;
--          after NUL, its name and NUL: jobs with a stalled attempt, of any priority, so that a claim may leave them out
-- due      id of the delayed ones by time; NUL .. group of those that rest until their rate lets them go on
-- parks    group .. NUL .. number .. id: held back by their group
-- heads    the same, of those among w, z, asides          out      active by group
-- groups   what was said to a group, or under '' to all: 1 if it is paused .. limit / capacity / per / weight
-- rates    capacity / per .. NUL .. group by the time at which its bucket is full, should it not be so
-- unmet    id .. NUL .. queue .. NUL .. id of what it waits for; both empty: the active job with its unique key
-- ttl      id by the time at which it expires
--! keys w z asides due parks heads out groups rates unmet ttl

local NUL = string.char(0)
local AFTER = string.char(1)
local FLIP = 2147483648

local group_limit = 1 -- where it is 0, groups hold nobody back

local function next_number(front)
  if not front then
    return numbers('rear', 1)
  end
  local number = call('HINCRBY', META, 'front', -1)
  if number == -1 then
    number = 2251799813685248 -- below all numbers made from the time since 2005
    call('HSET', META, 'front', string.format('%.0f', number))
  end
  return number
end

local function priority_of(job)
  return job.o.priority or 0
end

local function member(job)
  return pack('>I4', FLIP - priority_of(job)) .. job.mark .. job.id
end

local function group_of(job)
  return group_limit > 0 and job.o.group
end

local function entry_of(job)
  return job.o.group .. NUL .. job.mark .. job.id
end

local function aside_entry(job)
  return (job.b[STALLS] > 0 and NUL or '') .. job.name .. NUL .. member(job)
end

-- Among the jobs that may be claimed.
local function make_ready(job, front)
  job.mark = pack('>I8', next_number(front))
  job.state = WAITING
  if job.b[STALLS] > 0 then
    job.state = ASIDE
    call('ZADD', ASIDES, 0, aside_entry(job))
  elseif priority_of(job) ~= 0 then
    call('ZADD', Z, 0, member(job))
  elseif front then
    call('LPUSH', W, job.mark .. job.id)
  else
    call('RPUSH', W, job.mark .. job.id)
  end
  if group_of(job) then call('ZADD', HEADS, 0, entry_of(job)) end
  add('n:' .. job.name, 1)
  woken = true
end

local take_out_of_list
do
  -- The entry of a number in the list: they ascend, so it is looked for by halves.
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

  function take_out_of_list(entry)
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

local function take_out_of_line(job)
  if job.state == ASIDE then
    call('ZREM', ASIDES, aside_entry(job))
  elseif priority_of(job) ~= 0 then
    call('ZREM', Z, member(job))
  else
    take_out_of_list(job.mark .. job.id)
  end
  add('n:' .. job.name, -1)
end

-- Take a job out of those that may be claimed, to be put among them again. Whether it was one.
local function unready(job)
  if job.state ~= WAITING and job.state ~= ASIDE then return false end
  take_out_of_line(job)
  if group_of(job) then call('ZREM', HEADS, entry_of(job)) end
  return true
end

-- Groups: as many jobs of each as it weighs are ready, if its limit and its rate allow; when one is claimed, the next
-- gets there behind all others. So they take turns, and a claim never meets a blocked job.
local configure_groups, change_out, advance, park, unpark, is_held_back, claim_in_group, leave_group, leave_heads, regroup
do
  -- What the settings say of all groups, and what counts for each that was looked at.
  local default_rate, weights, known = false, {}, {}
  local SAID = '^(.)(%d*)/?(%d*)/?(%d*)/?(%d*)$'

  -- word: the limit, or (MessagePack) the limit, the rate (capacity, per) or false, and the weights by group.
  function configure_groups(word)
    group_limit = tonumber(word)
    if not group_limit then
      group_limit, default_rate, weights = unpack(decode(word))
    end
  end

  local function rules_of(group)
    local rules = known[group]
    if rules then return rules end
    rules = {limit = group_limit, weight = weights[group] or 1}
    if default_rate then rules.capacity, rules.per = default_rate[1], default_rate[2] end
    local said = call('HMGET', GROUPS, '', group)
    for i = 1, 2 do
      if said[i] then
        local paused, limit, capacity, per, weight = string.match(said[i], SAID)
        rules.paused = paused == '1'
        rules.limit = tonumber(limit) or rules.limit
        rules.weight = tonumber(weight) or rules.weight
        if capacity ~= '' then rules.capacity, rules.per = tonumber(capacity), tonumber(per) end
      end
    end
    known[group] = rules
    return rules
  end

  -- Milliseconds until a group's bucket is full, and its name. None is further from that than an empty one, but when
  -- the clock was set back.
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

  function change_out(group, number)
    if call('HINCRBY', OUT, group, number) <= 0 then
      call('HDEL', OUT, group)
    end
  end

  local function range_of(group)
    return '[' .. group .. NUL, '(' .. group .. AFTER
  end

  local function ready_of(group)
    return call('ZLEXCOUNT', HEADS, range_of(group))
  end

  local function parked_of(group, many)
    local first, last = range_of(group)
    return call('ZRANGEBYLEX', PARKS, first, last, 'LIMIT', 0, many)
  end

  -- How many of a group may be ready, as far as its limit goes.
  local function places_of(group, rules)
    if rules.paused then return 0 end
    return rules.limit - (call('HGET', OUT, group) or 0)
  end

  -- Times have parts of milliseconds, which are not exact.
  local NEARLY = 0.0001

  -- How many of a group may be ready, so that all of them may start.
  local function room_of(group, rules)
    local room = places_of(group, rules)
    if rules.capacity and room > 0 then
      local tokens = rules.capacity - missing_of(group, rules) * rules.capacity / rules.per
      return math.min(room, floor(tokens + NEARLY))
    end
    return room
  end

  -- Have a group rest, should its rate alone keep back the next of its jobs.
  local function note_rest(group, rules, ready)
    if not rules.capacity then return end
    local entry = NUL .. group
    if ready < math.min(rules.weight, places_of(group, rules), rules.capacity) and parked_of(group, 1)[1] then
      local wait = missing_of(group, rules) - (rules.capacity - ready - 1) * rules.per / rules.capacity
      if call('ZADD', DUE, math.max(now, math.ceil(now + wait - NEARLY)), entry) == 1 then
        add('r', 1)
        woken = true -- those who sleep until a later time, or for ever
      end
    elseif call('ZREM', DUE, entry) == 1 then
      add('r', -1)
    end
  end

  function advance(group)
    local rules, ready = rules_of(group), ready_of(group)
    if ready < rules.weight then
      local room = math.min(rules.weight, room_of(group, rules)) - ready
      for _, entry in ipairs(room > 0 and parked_of(group, room) or {}) do
        call('ZREM', PARKS, entry)
        add('p', -1)
        local job = load(sub(entry, #group + 10))
        make_ready(job)
        save(job) --@ nothing changes: parked and ready are both waiting
        ready = ready + 1
      end
    end
    note_rest(group, rules, ready)
  end

  function park(job, front)
    job.mark = pack('>I8', next_number(front))
    job.state = PARKED
    call('ZADD', PARKS, 0, entry_of(job))
    add('p', 1)
    local rules = rules_of(job.o.group)
    if rules.capacity then note_rest(job.o.group, rules, ready_of(job.o.group)) end
  end

  function unpark(job)
    call('ZREM', PARKS, entry_of(job))
    add('p', -1)
    local rules = rules_of(job.o.group)
    if rules.capacity then note_rest(job.o.group, rules, ready_of(job.o.group)) end
  end

  -- Whether one more may not be ready. again: one that goes before all others of its group.
  function is_held_back(group, again)
    local rules, ready = rules_of(group), ready_of(group)
    if not again and (ready >= rules.weight or rules.capacity and parked_of(group, 1)[1]) then return true end
    return room_of(group, rules) <= ready
  end

  -- A ready job is active.
  function claim_in_group(job)
    change_out(job.o.group, 1)
    take_token(job.o.group)
    leave_heads(job)
  end

  -- An active job is so no more.
  function leave_group(job)
    local group = group_of(job)
    if group then
      change_out(group, -1)
      advance(group)
    end
  end

  -- A ready job is so no more.
  function leave_heads(job)
    if group_of(job) then
      call('ZREM', HEADS, entry_of(job))
      advance(job.o.group)
    end
  end

  -- Have another limit of a group count: what may not be ready any more is parked again, the last first.
  function regroup(group)
    local heads, room = call('ZRANGEBYLEX', HEADS, range_of(group)), math.max(0, room_of(group, rules_of(group)))
    for i = #heads, room + 1, -1 do
      local job = load(sub(heads[i], #group + 10))
      unready(job)
      park(job, true)
      save(job) --@ nothing changes: parked and ready are both waiting
    end
    advance(group)
  end
end

-- Put a pending job where its dependencies, its time and its group say. The caller saves it.
-- again: it was active, and goes before all others of its group.
local function place(job, front, again)
  if job.unmet then
    job.state = BLOCKED
    add('b', 1)
    return
  end
  if job.b[RUN_AT] > now then
    job.state = DELAYED
    call('ZADD', DUE, job.b[RUN_AT], job.id)
    woken = true -- those who sleep until an earlier time
    return
  end
  front = front or job.o.lifo
  local group = group_of(job)
  if group and is_held_back(group, again) then
    park(job, front)
    return
  end
  make_ready(job, front)
end

local function send(queue, message)
  local number = numbers('sent', 1)
  call('RPUSH', OUTBOX, encode({string.format('%.0f', number), queue, encode(message)}))
end

-- Take a pending job out of the place where it is.
local function displace(job)
  local state = job.state
  if state == WAITING or state == ASIDE then
    take_out_of_line(job)
    leave_heads(job)
  elseif state == PARKED then
    unpark(job)
  elseif state == DELAYED then
    call('ZREM', DUE, job.id)
  elseif state == BLOCKED then
    call('ZREMRANGEBYLEX', UNMET, '[' .. job.id .. NUL, '(' .. job.id .. AFTER)
    add('b', -1)
  end
end

-- Whether a job waits for anything.
local function waits(id)
  return #call('ZRANGEBYLEX', UNMET, '[' .. id .. NUL, '(' .. id .. AFTER, 'LIMIT', 0, 1) > 0
end

local function unblock(job)
  add('b', -1)
  place(job)
  save(job) --@ unblock: blocked -> waiting|delayed
  woken = true
  tell(job.id, job.name, 'unblocked', NAMES[job.state])
end

-- One thing for which a blocked job waits has come to pass.
local function met(job, queue, id)
  call('ZREM', UNMET, job.id .. NUL .. queue .. NUL .. id)
  if not waits(job.id) then unblock(job) end
end

-- Put a job that was active among the pending ones again.
local function put_back(job, front)
  if front and group_of(job) and job.b[RUN_AT] <= now then
    change_out(job.o.group, -1) -- the next of its group must not overtake it
    place(job, front, true)
  else
    leave_group(job)
    place(job, front)
  end
end

local function promote_due(limit)
  local due, rested = call('ZRANGEBYSCORE', DUE, '-inf', now, 'LIMIT', 0, limit), 0
  moved = moved or #due > 0
  for _, id in ipairs(due) do
    call('ZREM', DUE, id)
    if sub(id, 1, 1) == NUL then
      add('r', -1)
      rested = rested + 1
      advance(sub(id, 2))
    else
      local job = load(id)
      if job and job.state == DELAYED then
        place(job)
        save(job) --@ promote: delayed -> waiting
        tell(id, job.name, 'promoted', NAMES[job.state])
      end
    end
  end
  return #due - rested
end
