-- Messages of another queue's outbox, each applied once. Arguments: the queue that they come from, this one,
-- what the settings say of groups, the dead letters' policy (ttl, retries, wait); then of each message its number and
-- itself.
-- Keys: of each job that is given away, its result, its log lines and its items, should it have a forerunner here, and
-- where it was noted to have gone from here; of each that is waited for, the first and the last of these; of each that is
-- held, let go, or has ended for more than are told at once, the first.
-- Answers whether the queue is to be listed, as it was not there before, or nobody may have come to list it.
--! include base job ready completion removal
--! keys inbox

local source, here = ARGV[ARGS], ARGV[ARGS + 1]
configure_groups(ARGV[ARGS + 2])
local policy = {tonumber(ARGV[ARGS + 3]), tonumber(ARGV[ARGS + 4]), ARGV[ARGS + 5]}
local NO_NUMBER = string.rep(NUL, 8)

local function hang(dependency, dependent, inc, rule)
  local number = pack('>I8', numbers('sent', 1))
  call('ZADD', DEPS, 0, dependency .. NUL .. number .. encode({source, dependent, inc, rule}))
end

-- `dependent`, in the queue `from`, does not wait for a job any more, nor hold its record.
local function let_go(dependency, from, dependent, inc, rule, result_key)
  if call('ZREM', HOLDS, dependency .. NUL .. encode({from, dependent, inc, rule})) == 1 then
    keep.let_go(dependency, result_key)
    return
  end
  -- From both ends: of thousands that wait for one job, the first or the last are the next to go.
  local low, high, step = '[' .. dependency .. NUL, '(' .. dependency .. AFTER, 50
  local many = call('ZLEXCOUNT', DEPS, low, high)
  for at = 0, many - 1, step do
    for _, ends in ipairs({
      call('ZREVRANGEBYLEX', DEPS, high, low, 'LIMIT', at, step), call('ZRANGEBYLEX', DEPS, low, high, 'LIMIT', at, step),
    }) do
      for _, entry in ipairs(ends) do
        local who = decode(sub(entry, #dependency + 10))
        if who[1] == from and who[2] == dependent and who[3] == inc then
          call('ZREM', DEPS, entry)
          return
        end
      end
    end
    if 2 * at > many then return end
  end
end

local function hold_for(job, dependent, inc, rule, result_key)
  if not ENDED[job.state] or job.state == FAILED or is_over(job) then return end
  if not keep.is_held(job) then
    keep.weigh(job, -1)
    keep.hold(job)
    save(job) --@ nothing changes but how long it is kept
    call('PERSIST', result_key)
  end
  call('ZADD', HOLDS, 0, job.id .. NUL .. encode({source, dependent, inc, rule}))
end

-- from: where a dependent was that has been moved, under another number: what it had there goes over.
-- patient: whether it waits for a job that has failed, too.
local function await(dependency, dependent, inc, rule, from, number, patient, result_key, moved_key)
  local job = load(dependency)
  if not job then
    local target = call('GET', moved_key)
    if target then
      send(source, {'moved', dependency, target, dependent, inc})
    else
      send(source, {'ended', dependency, 'cancelled', dependent, inc})
    end
  elseif not ENDED[job.state] or job.state == FAILED and (rule == 'wait' or patient) then
    hang(dependency, dependent, inc, rule)
  else
    hold_for(job, dependent, inc, rule, result_key)
    send(source, {'ended', dependency, NAMES[job.state], dependent, inc})
  end
  if from then let_go(dependency, from, dependent, number, rule, result_key) end
end

local function hold_also(dependency, dependent, inc, rule, from, number, result_key)
  local job = load(dependency)
  if job then hold_for(job, dependent, inc, rule, result_key) end
  let_go(dependency, from, dependent, number, rule, result_key)
end

-- Whether a job still needs another's record is asked there, should its word have been lost that it does not.
local function answer_to(dependency, dependent, inc, rule)
  local blob = call('HGET', JOBS, dependent)
  if not blob or sub(blob, 1, 8) ~= inc or call('SISMEMBER', NEEDS, dependent) == 0 then
    send(source, {'unbind', {dependency}, dependent, inc, rule})
  end
end

-- A job that others wait for has arrived where it was given: up to so many of those that hung here before are told,
-- the rest with another message.
local function forward(id, target, before)
  local kept, told = 0, 0
  while told < FAN do
    local found = call('ZRANGEBYLEX', DEPS, '[' .. id .. NUL, '(' .. id .. AFTER, 'LIMIT', kept, FAN)
    if #found == 0 then return end
    for _, entry in ipairs(found) do
      if unpack_number('>I8', entry, #id + 2) > before then
        kept = kept + 1
      elseif told < FAN then
        local who = decode(sub(entry, #id + 10))
        call('ZREM', DEPS, entry)
        send(who[1], {'moved', id, target, who[2], who[3]})
        told = told + 1
      end
    end
  end
  send('', {'forward', id, target, before})
end

-- The options of a job whose dependency is elsewhere by now say so.
local function rename(job, dependency, target)
  local found, seen = {}, {}
  for _, key in ipairs(job.o.depends_on) do
    if key[1] == source and key[2] == dependency then key[1] = target end
    local word = key[1] .. NUL .. key[2]
    if not seen[word] then
      seen[word] = true
      found[#found + 1] = key
    end
  end
  job.o.depends_on = found
  local blob = call('HGET', JOBS, job.id)
  local length = unpack_number('>I2', blob, 18)
  local size = unpack_number('>I4', blob, 20 + length)
  local options = encode(job.o)
  blob = sub(blob, 1, 19 + length) .. pack('>I4', #options) .. options .. sub(blob, 24 + length + size)
  call('HSET', JOBS, job.id, blob)
  note(job.id, 'u')
end

-- What a job waits for is in another queue by now.
local function follow(dependency, target, dependent, inc)
  local job = load(dependent)
  if not job or job.state ~= BLOCKED or job.inc ~= inc then return end
  if call('ZREM', UNMET, dependent .. NUL .. source .. NUL .. dependency) == 0 then return end
  rename(job, dependency, target)
  if call('ZADD', UNMET, 0, dependent .. NUL .. target .. NUL .. dependency) == 1 then
    local rule = job.o.on_dependency_failure or 'fail'
    send(target, {'await', dependency, dependent, inc, rule, false, false, keep.is_patient(job)})
  end
end

local function resolve(dependency, state, dependent, inc)
  local entry = dependent .. NUL .. source .. NUL .. dependency
  local blob, st = call('HGET', JOBS, dependent), call('HGET', ST, dependent)
  if not blob or not st or sub(st, 1, 1) ~= BLOCKED or sub(blob, 1, 8) ~= inc then return end
  if not call('ZSCORE', UNMET, entry) then return end
  if state == 'completed' then
    call('ZREM', UNMET, entry)
    -- Of a thousand dependencies only the last has the job itself looked at.
    if waits(dependent) then return end
    unblock(parse(dependent, blob, st))
    return
  end
  local job = parse(dependent, blob, st)
  local rule = job.o.on_dependency_failure or 'fail'
  if rule == 'ignore' then
    met(job, source, dependency)
  elseif rule == 'wait' and state == 'failed' then
    send(source, {'await', dependency, dependent, inc, rule})
  else
    job.lacks = keep.unmet_of(dependent)
    displace(job)
    if rule == 'cancel' then
      cancel(job, 'dependency_failed') --@ dependency_failed: blocked -> cancelled
      incident(job, 'cancelled')
    else
      -- Who may see this job may not know of the other queue.
      local from = source == here and string.format("dependency '%s'", dependency) or 'a dependency in another queue'
      local text = string.format('%s ended as %s', from, state)
      bury(job, 'dependency_failed', {'djqueue.core.errors.JobFailedError', text, ''}, policy) --@ dependency_failed: blocked -> failed
      incident(job, 'failed')
    end
  end
end

-- Among the dead letters, as it was: only its next retry by itself is as this queue has it, unless it comes back.
local function enter(job, finished, letter, back)
  job.state, job.finished, job.expires = FAILED, finished, letter[3]
  if not back then
    local retries = letter[4]
    local again = letter[1] ~= 'enqueue_rejected' and retries < policy[2]
    letter[5] = again and now + wait_of(policy[3], retries + 1, job.id) or 0
  end
  call('ZADD', FINISHED, job.expires, job.id)
  call('ZADD', DEAD, numbers('deaths', 1), job.id)
  call('HSET', LETTERS, job.id, encode(letter))
  if letter[5] ~= 0 then call('ZADD', AGAIN, letter[5], job.id) end
  keep.note(job)
  keep.weigh(job, 1)
  save(job) --@ nothing changes but the queue
  tell(job.id, job.name, 'failed', 'failed')
end

-- A job that another queue has given away, as it was; if its id or its unique key is taken here, it goes back. One
-- that comes back goes without its key if need be, and is forgotten if its id was enqueued anew meanwhile.
local function take_in(m, result_key, log_key, items_key, moved_key)
  local id, rest, created, body, back, runs, progress, lines, unmet, before, needs, letter = unpack(m, 2, 13)
  local there = load(id)
  local is_taken = there and not is_over(there)
    and (letter or there.state ~= FAILED and there.state ~= CANCELLED)
  local options = parse(id, NO_NUMBER .. created .. rest).o
  local rule = options.on_dependency_failure or 'fail'
  if back and is_taken then
    if needs then keep.tell(options.depends_on, 'unbind', id, needs, rule) end
    return
  end
  local key = not letter and options.unique_key
  local has_owner = key and owner_of(key)
  if is_taken or has_owner and not back then
    send(source, {'job', id, rest, created, body, true, runs, progress, lines, unmet, false, needs, letter})
    return
  end
  if there then
    remove(there, result_key, log_key, items_key, true)
  else
    call('DEL', result_key, log_key, items_key) -- of an obliterated queue
  end
  call('DEL', moved_key)
  local blob = pack('>I8', numbers('rear', 1)) .. created .. rest
  call('HSET', JOBS, id, blob)
  local job = parse(id, blob)
  keep.about('ZADD', job)
  job.b = decode(body)
  if runs then call('HSET', HIST, id, runs) end
  if progress then call('HSET', PROG, id, progress) end
  variadic('RPUSH', log_key, lines)
  if letter then
    enter(job, letter[1], decode(letter[2]), back)
    if before then send(source, {'gone', id, before}) end
    return
  end
  if not has_owner then take_key(job) end
  local waited_for, from = {}, back and here or source
  for _, other in ipairs(unmet) do
    job.unmet = true
    waited_for[other[1] .. NUL .. other[2]] = true
    call('ZADD', UNMET, 0, id .. NUL .. other[1] .. NUL .. other[2])
    send(other[1], {'await', other[2], id, job.inc, rule, needs and from, needs, keep.is_patient(job)})
  end
  if needs then
    call('SADD', NEEDS, id)
    local held = {}
    for _, other in ipairs(options.depends_on) do
      if not waited_for[other[1] .. NUL .. other[2]] then held[#held + 1] = other end
    end
    keep.tell(held, 'hold', id, job.inc, rule, from, needs)
  end
  if job.o.ttl and job.b[STARTED] == 0 then
    call('ZADD', TTL, job.created + job.o.ttl, id)
  end
  place(job)
  save(job) --@ nothing changes but the queue
  woken = true
  tell(id, job.name, 'queued', NAMES[job.state])
  if before then send(source, {'gone', id, before}) end
end

local WITH = {job = 4, await = 2, fan = 1} -- keys
keep.count_together()
local was_there, is_again = call('EXISTS', META) == 1, true
local mark = tonumber(call('HGET', INBOX, source) or 0)
local key = FIXED
for i = ARGS + 6, #ARGV, 2 do
  local number, m = tonumber(ARGV[i]), decode(ARGV[i + 1])
  local first = key
  key = key + (WITH[m[1]] or (m[1] == 'unbind' or m[1] == 'hold') and #m[2] or 0)
  if number > mark then
    is_again = false
    mark = number
    if m[1] == 'await' then
      await(m[2], m[3], m[4], m[5], m[6], m[7], m[8], KEYS[first + 1], KEYS[first + 2])
    elseif m[1] == 'unbind' then
      for at, id in ipairs(m[2]) do let_go(id, source, m[3], m[4], m[5], KEYS[first + at]) end
    elseif m[1] == 'hold' then
      for at, id in ipairs(m[2]) do hold_also(id, m[3], m[4], m[5], m[6], m[7], KEYS[first + at]) end
    elseif m[1] == 'asked' then
      answer_to(m[2], m[3], m[4], m[5])
    elseif m[1] == 'fan' then
      call('ZREM', HOLDS, m[2] .. NUL)
      fan(m[2], m[3], m[4] or number, m[5] and call('HEXISTS', JOBS, m[2]) == 1)
      if m[5] then keep.let_go(m[2], KEYS[key]) end
    elseif m[1] == 'ended' then
      resolve(m[2], m[3], m[4], m[5])
    elseif m[1] == 'moved' then
      follow(m[2], m[3], m[4], m[5])
    elseif m[1] == 'gone' then
      forward(m[2], source, m[3])
    elseif m[1] == 'forward' then
      forward(m[2], m[3], m[4])
    elseif m[1] == 'job' then
      take_in(m, KEYS[first + 1], KEYS[first + 2], KEYS[first + 3], KEYS[key])
    end
  end
end
keep.counted()
call('HSET', INBOX, source, string.format('%.0f', mark))
local is_there = call('EXISTS', META) == 1
if is_there then
  call('PERSIST', INBOX)
else
  call('PEXPIRE', INBOX, 86400000)
end
return answer(is_there and (is_again or not was_there) and 1 or 0)
