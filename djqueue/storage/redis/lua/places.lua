-- Where pending jobs wait, each place of one queue in one key.
--
-- w        list of (number .. id): priority 0, ascending numbers; '' where one was taken out
-- z        sorted set, all scores 0: (priority, reversed .. number .. id) of the other priorities
-- asides   the same, after its name and NUL: jobs for which a worker that met them has no handler
-- due      id of the delayed ones by time      parks    group .. NUL .. number .. id      out   ready and active by group
-- unmet    id .. NUL .. queue .. NUL .. id of what it waits for; both empty: the active job with its unique key
-- ttl      id by the time at which it expires
--! keys w z asides due parks out unmet ttl

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

-- Groups: at most so many of one are ready or active; the others are parked.
local function out_of(group)
  return tonumber(call('HGET', OUT, group) or 0)
end

local function change_out(group, number)
  if call('HINCRBY', OUT, group, number) <= 0 then
    call('HDEL', OUT, group)
  end
end

local function first_parked(group)
  local found = call('ZRANGEBYLEX', PARKS, '[' .. group .. NUL, '(' .. group .. AFTER, 'LIMIT', 0, 1)
  return found[1]
end

local function advance(group)
  while out_of(group) < group_limit do
    local found = first_parked(group)
    if not found then return end
    call('ZREM', PARKS, found)
    add('p', -1)
    local job = load(sub(found, #group + 10))
    change_out(group, 1)
    make_ready(job)
    save(job) --@ nothing changes: parked and ready are both waiting
  end
end

local function leave_group(job)
  local group = job.o.group
  if group then
    change_out(group, -1)
    advance(group)
  end
end

-- Put a pending job where its dependencies, its time and its group say. The caller saves it.
local function place(job, front)
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
  local group = job.o.group
  if group then
    if out_of(group) >= group_limit then
      job.mark = pack('>I8', next_number(front))
      job.state = PARKED
      call('ZADD', PARKS, 0, group .. NUL .. job.mark .. job.id)
      add('p', 1)
      return
    end
    change_out(group, 1)
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

-- Take a job out of those that may be claimed; it still holds its group's place. Whether it was one.
local function unready(job)
  if job.state == ASIDE then
    call('ZREM', ASIDES, job.name .. NUL .. member(job))
  elseif job.state ~= WAITING then
    return false
  elseif priority_of(job) ~= 0 then
    call('ZREM', Z, member(job))
  else
    take_out_of_list(job.mark .. job.id)
  end
  add('n:' .. job.name, -1)
  return true
end

-- Take a pending job out of the place where it is.
local function displace(job)
  local state = job.state
  if unready(job) then
    leave_group(job)
  elseif state == PARKED then
    call('ZREM', PARKS, job.o.group .. NUL .. job.mark .. job.id)
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
  if front and job.o.group and job.b[RUN_AT] <= now then
    change_out(job.o.group, -1) -- the next of its group must not overtake it
  else
    leave_group(job)
  end
  place(job, front)
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
