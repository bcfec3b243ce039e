-- Enqueue up to a thousand jobs of one batch.
--
-- KEYS: of each job, its result, its log lines and its items, in case its id was used before.
-- ARGV: '1' if the caller has listed the queue; the jobs' name; when they start ('' now, a delay, '@' and a time, or '*'
--   if each job's own follows its id); the configuration of groups; the maximum number of pending jobs ('' for none);
--   what is dropped above that ('' nothing, 'o' the oldest, 'l' the lowest priority); the dead letters' ttl; then of
--   each job its id and its record from the flag on.
-- Returns a list for each job (result, id, ...), 'full' if none was enqueued, or 'unlisted' if the queue is new. The
--   reply to a repetition has 1 in place of the results of completed jobs, which may be large.
--! include base job ready completion removal room
--! keys gone

local name, start = ARGV[ARGS + 1], ARGV[ARGS + 2]
configure_groups(ARGV[ARGS + 3])
local limit, rank = tonumber(ARGV[ARGS + 4]), ARGV[ARGS + 5]
local dead_letter_policy = {tonumber(ARGV[ARGS + 6]), 0, 0}
local first = ARGS + 7
local stride = start == '*' and 3 or 2
local count = (#ARGV - first + 1) / stride
if ARGV[ARGS] == '0' and call('EXISTS', META) == 0 then return {0, 'unlisted'} end
local created = pack('>I8', now)

local replies, remembered, has_results = {}, {}, false
local has_leftovers = call('EXISTS', GONE) == 1 -- of an obliterated queue

local function options_of(rest)
  return decode(sub(rest, 8 + #name, 7 + #name + unpack_number('>I4', rest, 4 + #name)))
end

-- Return the number of waiting, delayed and blocked jobs.
local function pending()
  local after_end = call('HMGET', META, 'c', 'x')
  local others = call('ZCARD', LEASE) + call('ZCARD', DEAD) + (tonumber(after_end[1]) or 0) + (tonumber(after_end[2]) or 0)
  return call('HLEN', JOBS) - others
end

local function create(id, start, rest, result_key, log_key, items_key, rival, owner)
  if has_leftovers and result_key then call('DEL', result_key, log_key, items_key) end
  local blob = pack('>I8', next_numbers('rear', 1)) .. created .. rest
  call('HSET', JOBS, id, blob)
  local job = parse(id, blob)
  keep.index_subject('ZADD', job)
  local run_at = now
  if sub(start, 1, 1) == '@' then
    run_at = tonumber(sub(start, 2))
  elseif start ~= '' then
    run_at = now + tonumber(start)
  end
  if rival and rival.state ~= BLOCKED and job.o.on_duplicate ~= 'debounce' then
    run_at = math.min(run_at, rival.b[RUN_AT]) -- otherwise a job that is replaced again and again would never start
  end
  if rival then
    leave_pending(rival)
    cancel(rival, 'replaced')
  end
  if job.flag == 'p' and run_at <= now then
    call('RPUSH', W, job.inc .. id)
    add('n:' .. name, 1)
    woken = true
    note(id, WAITING)
  else
    local o = job.o
    job.b[RUN_AT] = run_at
    if owner then wait_behind(job, owner) else take_key(job) end
    if o.ttl then call('ZADD', TTL, now + o.ttl, id) end
    local waits_for = o.depends_on or {}
    if #waits_for > 0 then call('SADD', NEEDS, id) end
    for _, key in ipairs(waits_for) do
      if call('ZADD', UNMET, 0, id .. NUL .. key[1] .. NUL .. key[2]) == 1 then
        job.unmet = true
        send(key[1], {'await', key[2], id, job.inc, dependency_rule_of(o)})
      end
    end
    make_pending(job)
    save(job) --@ enqueue: failed|cancelled -> waiting|delayed|blocked
  end
  if limit and rank ~= '' then call('ZADD', DROPS, 0, drop_member(job, rank)) end
  emit_event(id, name, 'enqueued', NAMES[job.state])
  return {'queued', id, rival and rival.id or nil}
end

-- Add a job as a dead letter, unless its id is taken.
local function reject(id, rest, error)
  if not load(id) then
    local blob = pack('>I8', next_numbers('rear', 1)) .. created .. rest
    call('HSET', JOBS, id, blob)
    local job = parse(id, blob)
    keep.index_subject('ZADD', job)
    bury(job, REASONS.ENQUEUE_REJECTED, {error[1], error[2], ''}, dead_letter_policy)
    incident(job, 'failed')
  end
  return {'rejected', id}
end

local function enqueue(id, start, rest, result_key, log_key, items_key)
  local options = options_of(rest)
  if options.rejected then return reject(id, rest, options.rejected) end
  local existing = load(id)
  if existing and is_over(existing) then
    remove(existing, result_key, log_key, items_key)
    existing = nil
  end
  if existing and existing.state == COMPLETED then
    return {'completed', id, 'completed', call('GET', result_key)}
  end
  if existing and existing.state ~= FAILED and existing.state ~= CANCELLED then
    return {'duplicate', id, NAMES[existing.state]}
  end
  local key, policy = options.unique_key, options.on_duplicate or DEFAULT.ON_DUPLICATE
  local held = key and owner_of(key)
  local rival, owner = held and load(held), nil
  if rival then
    local runs = rival.state == ACTIVE
    if policy == 'keep' or runs and policy ~= 'keep_last_if_active' then
      return {'duplicate', held, NAMES[rival.state]}
    end
    if runs then
      rival, owner = follower(key), rival
    end
  end
  if limit and rank ~= '' and not rival and pending() >= limit then
    local job, entry = first_to_drop(options.priority or 0)
    if not job then return 'full' end -- none was enqueued before it: that one could be dropped
    call('ZREM', DROPS, entry)
    leave_pending(job)
    cancel(job, 'dropped')
  end
  if existing then
    remove(existing, result_key, log_key, items_key, true)
  end
  return create(id, start, rest, result_key, log_key, items_key, rival, owner)
end

-- Return how many jobs would be added, without duplicates and those that replace others.
local function growth()
  local seen, new = {}, 0
  for i = 0, count - 1 do
    local id = ARGV[first + stride * i]
    if options_of(ARGV[first + stride * i + stride - 1]).rejected then seen[id] = true end
    local job = not seen[id] and load(id)
    if not seen[id] and (not job or is_over(job) or job.state == FAILED or job.state == CANCELLED) then
      new = new + 1
    end
    seen[id] = true
  end
  local options = count > 0 and options_of(ARGV[first + stride - 1]) or NO_OPTIONS
  local key = options.unique_key
  if not key or new == 0 then return new end
  local held = owner_of(key)
  local owner = held and load(held)
  if not owner then return 1 end
  local follows = owner.state == ACTIVE and options.on_duplicate == 'keep_last_if_active'
  return follows and not follower(key) and 1 or 0
end

if limit and rank == '' then
  local room = limit - pending()
  if count > room and growth() > math.max(0, room) then return answer('full') end
end
for i = 0, count - 1 do
  local at, key = first + stride * i, FIXED + 3 * i
  local own = stride == 3 and ARGV[at + 1] or start
  local reply = enqueue(ARGV[at], own, ARGV[at + stride - 1], KEYS[key + 1], KEYS[key + 2], KEYS[key + 3])
  if reply == 'full' then return answer('full') end
  replies[i + 1], remembered[i + 1] = reply, reply
  if reply[4] then
    has_results = true
    remembered[i + 1] = {reply[1], reply[2], reply[3], 1}
  end
end
if limit and rank ~= '' then clean_drops(2 * count + 2) end
return answer(replies, has_results and remembered or nil)
