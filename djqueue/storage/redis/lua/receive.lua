-- Apply messages from the outbox of another queue, each once.
--
-- KEYS: for each message, the keys of the job that it names: 'job' its result, log lines, items and forwarding note;
--   'await' its result and forwarding note; 'fan' its result; 'unbind' and 'hold' the results of all jobs named.
-- ARGV: the sending queue, this queue, the configuration of groups, the dead letter policy (ttl, retries, wait); then
--   number and content of each message (MessagePack).
-- `arrivals` exists while a snapshot is read: the ids of jobs that were moved here meanwhile.
-- Returns 1 if the queue has to be listed, because it was not there before or its listing may have been interrupted.
--! include base job ready completion removal
--! keys inbox arrivals

local source, here = ARGV[ARGS], ARGV[ARGS + 1]
configure_groups(ARGV[ARGS + 2])
local policy = {tonumber(ARGV[ARGS + 3]), tonumber(ARGV[ARGS + 4]), ARGV[ARGS + 5]}
local NO_NUMBER = string.rep(NUL, 8)

local function add_dependent(dependency, dependent, inc, rule)
  local number = pack('>I8', next_numbers('sent', 1))
  call('ZADD', DEPS, 0, dependency .. NUL .. number .. encode({source, dependent, inc, rule}))
end

-- Stop a job from waiting for a dependency, or from holding its record. from: the dependent's queue.
local function release_hold(dependency, from, dependent, inc, rule, result_key)
  if call('ZREM', HOLDS, dependency .. NUL .. encode({from, dependent, inc, rule})) == 1 then
    keep.release_record(dependency, result_key)
    return
  end
  -- Search from both ends: of thousands of dependents, the first or the last ones usually go next.
  local low, high, step = '[' .. dependency .. NUL, '(' .. dependency .. AFTER, 50
  local total = call('ZLEXCOUNT', DEPS, low, high)
  for at = 0, total - 1, step do
    for _, entries in ipairs({
      call('ZREVRANGEBYLEX', DEPS, high, low, 'LIMIT', at, step), call('ZRANGEBYLEX', DEPS, low, high, 'LIMIT', at, step),
    }) do
      for _, entry in ipairs(entries) do
        local who = decode(sub(entry, #dependency + 10))
        if who[1] == from and who[2] == dependent and who[3] == inc then
          call('ZREM', DEPS, entry)
          return
        end
      end
    end
    if 2 * at > total then return end
  end
end

local function hold_for(job, dependent, inc, rule, result_key)
  if not ENDED[job.state] or job.state == FAILED or is_over(job) then return end
  if not keep.is_held(job) then
    keep.count_bytes(job, -1)
    keep.hold(job)
    save(job) --@ nothing changes but how long it is kept
    call('PERSIST', result_key)
  end
  call('ZADD', HOLDS, 0, job.id .. NUL .. encode({source, dependent, inc, rule}))
end

-- Let a job of the sending queue wait for a dependency here.
-- from, number: the queue and number that a moved dependent had before; its entry under these is removed.
-- waits_for_failed: whether it also waits for a dependency that has failed.
local function await(dependency, dependent, inc, rule, from, number, waits_for_failed, result_key, moved_key)
  local job = load(dependency)
  if not job then
    local target = call('GET', moved_key)
    if target then
      send(source, {'moved', dependency, target, dependent, inc})
    else
      send(source, {'ended', dependency, 'cancelled', dependent, inc})
    end
  elseif not ENDED[job.state] or job.state == FAILED and (rule == 'wait' or waits_for_failed) then
    add_dependent(dependency, dependent, inc, rule)
  else
    hold_for(job, dependent, inc, rule, result_key)
    send(source, {'ended', dependency, NAMES[job.state], dependent, inc})
  end
  if from then release_hold(dependency, from, dependent, number, rule, result_key) end
end

local function hold_also(dependency, dependent, inc, rule, from, number, result_key)
  local job = load(dependency)
  if job then hold_for(job, dependent, inc, rule, result_key) end
  release_hold(dependency, from, dependent, number, rule, result_key)
end

-- Reply to the question whether a job still needs a record: the message that it does not may have been lost.
local function confirm_need(dependency, dependent, inc, rule)
  local blob = call('HGET', JOBS, dependent)
  if not blob or sub(blob, 1, 8) ~= inc or call('SISMEMBER', NEEDS, dependent) == 0 then
    send(source, {'unbind', {dependency}, dependent, inc, rule})
  end
end

-- Tell the dependents of a moved job that it has arrived in its new queue; if there are too many, the rest with another
-- message. before: the number of the job's move.
local function forward(id, target, before)
  local function notify(who) send(who[1], {'moved', id, target, who[2], who[3]}) end
  if dependents.each(id, before, notify) then send('', {'forward', id, target, before}) end
end

-- Write the new queue of a dependency that was moved to a job's options.
local function rename(job, dependency, target)
  local found, seen = {}, {}
  for _, key in ipairs(job.o.depends_on) do
    if key[1] == source and key[2] == dependency then key[1] = target end
    local name = key[1] .. NUL .. key[2]
    if not seen[name] then
      seen[name] = true
      found[#found + 1] = key
    end
  end
  job.o.depends_on = found
  local blob = call('HGET', JOBS, job.id)
  local first, last = options_range(blob)
  local options = encode(job.o)
  blob = sub(blob, 1, first - 5) .. pack('>I4', #options) .. options .. sub(blob, last + 1)
  call('HSET', JOBS, job.id, blob)
  note(job.id, 'u')
end

-- Let a job wait for a dependency that was moved to another queue.
local function follow_moved(dependency, target, dependent, inc)
  local job = load(dependent)
  if not job or job.state ~= BLOCKED or job.inc ~= inc then return end
  if call('ZREM', UNMET, dependent .. NUL .. source .. NUL .. dependency) == 0 then return end
  rename(job, dependency, target)
  if call('ZADD', UNMET, 0, dependent .. NUL .. target .. NUL .. dependency) == 1 then
    local rule = dependency_rule_of(job.o)
    send(target, {'await', dependency, dependent, inc, rule, false, false, keep.waits_for_failed(job)})
  end
end

local function resolve(dependency, state, dependent, inc)
  local entry = dependent .. NUL .. source .. NUL .. dependency
  local blob, st = call('HGET', JOBS, dependent), call('HGET', ST, dependent)
  if not blob or not st or sub(st, 1, 1) ~= BLOCKED or sub(blob, 1, 8) ~= inc then return end
  if not call('ZSCORE', UNMET, entry) then return end
  if state == 'completed' then
    call('ZREM', UNMET, entry)
    -- Load the job only when its last dependency has completed.
    if has_entries(UNMET, dependent) then return end
    unblock(parse(dependent, blob, st))
    return
  end
  local job = parse(dependent, blob, st)
  local rule = dependency_rule_of(job.o)
  if rule == 'ignore' then
    dependency_met(job, source, dependency)
  elseif rule == 'wait' and state == 'failed' then
    send(source, {'await', dependency, dependent, inc, rule})
  else
    job.unmet_dependencies = keep.unmet_of(dependent)
    leave_pending(job)
    if rule == 'cancel' then
      cancel(job, REASONS.DEPENDENCY_FAILED) --@ dependency_failed: blocked -> cancelled
      incident(job, 'cancelled')
    else
      -- The users who may see this job may not be allowed to know about the other queue.
      local from = source == here and string.format("dependency '%s'", dependency) or 'a dependency in another queue'
      local text = string.format('%s ended as %s', from, state)
      bury(job, REASONS.DEPENDENCY_FAILED, {ERRORS.JOB_FAILED, text, ''}, policy) --@ dependency_failed: blocked -> failed
      incident(job, 'failed')
    end
  end
end

-- Add a dead letter as it was. This queue's policy sets its next automatic retry, unless it comes back.
local function receive_dead_letter(job, finished, dead_letter, back)
  job.state, job.finished, job.expires = FAILED, finished, dead_letter[3]
  if not back then
    local retries = dead_letter[4]
    local may_retry = dead_letter[1] ~= REASONS.ENQUEUE_REJECTED and retries < policy[2]
    dead_letter[5] = may_retry and now + keep.wait_of(policy[3], retries + 1, job.id) or 0
  end
  call('ZADD', FINISHED, job.expires, job.id)
  call('ZADD', DEAD, next_numbers('deaths', 1), job.id)
  call('HSET', DEAD_LETTERS, job.id, encode(dead_letter))
  if dead_letter[5] ~= 0 then call('ZADD', AUTO_RETRIES, dead_letter[5], job.id) end
  keep.note_details(job)
  keep.count_bytes(job, 1)
  save(job) --@ nothing changes but the queue
  emit_event(job.id, job.name, 'failed', 'failed')
end

-- Add a job that another queue has moved here. If its id or its unique key is taken here, it goes back. A job that comes
-- back gives up its key if need be, and is dropped if its id was enqueued anew meanwhile.
local function receive_job(m, result_key, log_key, items_key, moved_key)
  local id, rest, created, body, back, runs, progress, lines, unmet, before, needs, dead_letter = unpack(m, 2, 13)
  local existing = load(id)
  local is_taken = existing and not is_over(existing)
    and (dead_letter or existing.state ~= FAILED and existing.state ~= CANCELLED)
  local options = parse(id, NO_NUMBER .. created .. rest).o
  local rule = dependency_rule_of(options)
  if back and is_taken then
    if needs then dependents.send_grouped(options.depends_on, 'unbind', id, needs, rule) end
    return
  end
  local key = not dead_letter and options.unique_key
  local has_owner = key and owner_of(key)
  if is_taken or has_owner and not back then
    send(source, {'job', id, rest, created, body, true, runs, progress, lines, unmet, false, needs, dead_letter})
    return
  end
  if existing then
    remove(existing, result_key, log_key, items_key, true)
  else
    call('DEL', result_key, log_key, items_key) -- left by an obliterated queue
  end
  call('DEL', moved_key)
  local blob = pack('>I8', next_numbers('rear', 1)) .. created .. rest
  call('HSET', JOBS, id, blob)
  call('RPUSHX', ARRIVALS, id)
  local job = parse(id, blob)
  keep.index_subject('ZADD', job)
  job.b = decode(body)
  if runs then call('HSET', HIST, id, runs) end
  if progress then call('HSET', PROG, id, progress) end
  variadic('RPUSH', log_key, lines)
  if dead_letter then
    receive_dead_letter(job, dead_letter[1], decode(dead_letter[2]), back)
    if before then send(source, {'gone', id, before}) end
    return
  end
  if not has_owner then take_key(job) end
  local waited_for, from = {}, back and here or source
  for _, other in ipairs(unmet) do
    job.unmet = true
    waited_for[other[1] .. NUL .. other[2]] = true
    call('ZADD', UNMET, 0, id .. NUL .. other[1] .. NUL .. other[2])
    send(other[1], {'await', other[2], id, job.inc, rule, needs and from, needs, keep.waits_for_failed(job)})
  end
  if needs then
    call('SADD', NEEDS, id)
    local held = {}
    for _, other in ipairs(options.depends_on) do
      if not waited_for[other[1] .. NUL .. other[2]] then held[#held + 1] = other end
    end
    dependents.send_grouped(held, 'hold', id, job.inc, rule, from, needs)
  end
  if job.o.ttl and job.b[STARTED] == 0 then
    call('ZADD', TTL, job.created + job.o.ttl, id)
  end
  make_pending(job)
  save(job) --@ nothing changes but the queue
  woken = true
  emit_event(id, job.name, 'enqueued', NAMES[job.state])
  if before then send(source, {'gone', id, before}) end
end

local KEYS_OF = {job = 4, await = 2, fan = 1}
keep.batch_counts()
local was_there, is_again = call('EXISTS', META) == 1, true
local mark = tonumber(call('HGET', INBOX, source) or 0)
local key = FIXED
for i = ARGS + 6, #ARGV, 2 do
  local number, m = tonumber(ARGV[i]), decode(ARGV[i + 1])
  local first = key
  key = key + (KEYS_OF[m[1]] or (m[1] == 'unbind' or m[1] == 'hold') and #m[2] or 0)
  if number > mark then
    is_again = false
    mark = number
    if m[1] == 'await' then
      await(m[2], m[3], m[4], m[5], m[6], m[7], m[8], KEYS[first + 1], KEYS[first + 2])
    elseif m[1] == 'unbind' then
      for at, id in ipairs(m[2]) do release_hold(id, source, m[3], m[4], m[5], KEYS[first + at]) end
    elseif m[1] == 'hold' then
      for at, id in ipairs(m[2]) do hold_also(id, m[3], m[4], m[5], m[6], m[7], KEYS[first + at]) end
    elseif m[1] == 'asked' then
      confirm_need(m[2], m[3], m[4], m[5])
    elseif m[1] == 'fan' then
      call('ZREM', HOLDS, m[2] .. NUL)
      dependents.notify(m[2], m[3], m[4] or number, m[5] and call('HEXISTS', JOBS, m[2]) == 1)
      if m[5] then keep.release_record(m[2], KEYS[key]) end
    elseif m[1] == 'ended' then
      resolve(m[2], m[3], m[4], m[5])
    elseif m[1] == 'moved' then
      follow_moved(m[2], m[3], m[4], m[5])
    elseif m[1] == 'gone' then
      forward(m[2], source, m[3])
    elseif m[1] == 'forward' then
      forward(m[2], m[3], m[4])
    elseif m[1] == 'job' then
      receive_job(m, KEYS[first + 1], KEYS[first + 2], KEYS[first + 3], KEYS[key])
    end
  end
end
keep.write_counts()
call('HSET', INBOX, source, string.format('%.0f', mark))
local is_there = call('EXISTS', META) == 1
if is_there then
  call('PERSIST', INBOX)
else
  call('PEXPIRE', INBOX, DAY)
end
return answer(is_there and (is_again or not was_there) and 1 or 0)
