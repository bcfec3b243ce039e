-- Where pending jobs wait, each place of one queue in one key.
--
-- w        list of (number .. id): priority 0, ascending numbers; '' where one was taken out
-- z        sorted set, all scores 0: (priority, reversed .. number .. id) of the other priorities
-- asides   the same, after its name and NUL: jobs for which a worker that met them has no handler
-- due      id of the delayed ones by time      parks    group .. NUL .. number .. id: held back by their group
-- heads    the same, of those among w, z, asides          out      active by group
-- groups   what was said to a group, or under '' to all: 1 if it is paused .. its limit
-- unmet    id .. NUL .. queue .. NUL .. id of what it waits for; both empty: the active job with its unique key
-- ttl      id by the time at which it expires
--! keys w z asides due parks heads out groups unmet ttl

local NUL = string.char(0)
local AFTER = string.char(1)
local FLIP = 2147483648
local group_limit = 1 -- set by scripts whose callers know it

-- Below all numbers made from the time since 2005.
local FRONT = 2251799813685248

local function next_number(front)
  if not front then
    return numbers('rear', 1)
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

local function member(job)
  return pack('>I4', FLIP - priority_of(job)) .. job.mark .. job.id
end

-- Where the limit is 0, groups hold nobody back.
local function group_of(job)
  return group_limit > 0 and job.o.group
end

local function entry_of(job)
  return job.o.group .. NUL .. job.mark .. job.id
end

-- Among the jobs that may be claimed.
local function make_ready(job, front)
  job.mark = pack('>I8', next_number(front))
  job.state = WAITING
  if priority_of(job) ~= 0 then
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

local function take_out_of_list(entry)
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

-- Groups: one of each is ready, if its limit allows; when that one is claimed, the next gets behind all others.
-- So they take turns, and a claim never meets a blocked job.
local function of_group(group)
  return '[' .. group .. NUL, '(' .. group .. AFTER
end

local function ready_of(group)
  return call('ZLEXCOUNT', HEADS, of_group(group))
end

-- How many more of a group may be active.
local function room_of(group)
  local said = call('HMGET', GROUPS, group, '')
  if said[1] and sub(said[1], 1, 1) == '1' then return 0 end
  local limit = said[1] and tonumber(sub(said[1], 2)) or tonumber(said[2] and sub(said[2], 2)) or group_limit
  return limit - (call('HGET', OUT, group) or 0)
end

local function change_out(group, number)
  if call('HINCRBY', OUT, group, number) <= 0 then
    call('HDEL', OUT, group)
  end
end

local function advance(group)
  if ready_of(group) > 0 or room_of(group) <= 0 then return end
  local first, last = of_group(group)
  local found = call('ZRANGEBYLEX', PARKS, first, last, 'LIMIT', 0, 1)[1]
  if not found then return end
  call('ZREM', PARKS, found)
  add('p', -1)
  local job = load(sub(found, #group + 10))
  make_ready(job)
  save(job) --@ nothing changes: parked and ready are both waiting
end

local function park(job, front)
  job.mark = pack('>I8', next_number(front))
  job.state = PARKED
  call('ZADD', PARKS, 0, entry_of(job))
  add('p', 1)
end

-- An active job is so no more.
local function leave_group(job)
  local group = group_of(job)
  if group then
    change_out(group, -1)
    advance(group)
  end
end

-- A ready job is so no more.
local function leave_heads(job)
  if group_of(job) then
    call('ZREM', HEADS, entry_of(job))
    advance(job.o.group)
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
  if group then
    local ready = ready_of(group)
    if ready > 0 and not again or room_of(group) <= ready then
      park(job, front)
      return
    end
  end
  make_ready(job, front)
end

local function send(queue, message)
  local number = numbers('sent', 1)
  call('RPUSH', OUTBOX, encode({string.format('%.0f', number), queue, encode(message)}))
end

-- What a blocked job waits for, it waits for no more.
local function unbind(job)
  local prefix = job.id .. NUL
  local found = call('ZRANGEBYLEX', UNMET, '[' .. prefix, '(' .. job.id .. AFTER)
  for _, entry in ipairs(found) do
    local rest = sub(entry, #prefix + 1)
    local at = string.find(rest, NUL, 1, true)
    if at > 1 then send(sub(rest, 1, at - 1), {'unbind', sub(rest, at + 1), job.id, job.inc}) end
    call('ZREM', UNMET, entry)
  end
end

local function take_out_of_line(job)
  if job.state == ASIDE then
    call('ZREM', ASIDES, job.name .. NUL .. member(job))
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

-- Have another limit of a group count: what may not be ready any more is parked again, the last first.
local function regroup(group)
  local heads, room = call('ZRANGEBYLEX', HEADS, of_group(group)), math.max(0, room_of(group))
  for i = #heads, room + 1, -1 do
    local job = load(sub(heads[i], #group + 10))
    unready(job)
    park(job, true)
    save(job) --@ nothing changes: parked and ready are both waiting
  end
  advance(group)
end

-- Take a pending job out of the place where it is.
local function displace(job)
  local state = job.state
  if state == WAITING or state == ASIDE then
    take_out_of_line(job)
    leave_heads(job)
  elseif state == PARKED then
    call('ZREM', PARKS, entry_of(job))
    add('p', -1)
  elseif state == DELAYED then
    call('ZREM', DUE, job.id)
  elseif state == BLOCKED then
    unbind(job)
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
  local due = call('ZRANGEBYSCORE', DUE, '-inf', now, 'LIMIT', 0, limit)
  for _, id in ipairs(due) do
    call('ZREM', DUE, id)
    local job = load(id)
    if job and job.state == DELAYED then
      place(job)
      save(job) --@ promote: delayed -> waiting
      tell(id, job.name, 'promoted', NAMES[job.state])
    end
  end
  return #due
end
