-- Add up to a thousand jobs of one batch.
--
-- Arguments: whether the caller has seen to it that the queue is listed ('1'), the jobs' name, '' or a delay or '@' and a time, the group limit; then for each its id and the
-- rest of its record, behind the time. Keys: of each, its result and its log lines.
--! include base job places ends
--! keys gone

local name, start = ARGV[ARGS + 1], ARGV[ARGS + 2]
group_limit = tonumber(ARGV[ARGS + 3])
local first = ARGS + 4
local many = (#ARGV - first + 1) / 2
if ARGV[ARGS] == '0' and call('EXISTS', META) == 0 then return {0, 'unlisted'} end
local created = pack('>I8', now)

local replies = {}
local has_leftovers = call('EXISTS', GONE) == 1 -- of an obliterated queue

local function create(id, rest, result_key, log_key, rival, owner)
  if has_leftovers and result_key then call('DEL', result_key, log_key) end
  local blob = pack('>I8', numbers('rear', 1)) .. created .. rest
  call('HSET', JOBS, id, blob)
  local job = parse(id, blob)
  local run_at = now
  if sub(start, 1, 1) == '@' then
    run_at = tonumber(sub(start, 2))
  elseif start ~= '' then
    run_at = now + tonumber(start)
  end
  if rival and rival.state ~= BLOCKED and job.o.on_duplicate ~= 'debounce' then
    run_at = math.min(run_at, rival.b[RUN_AT]) -- else one that is replaced again and again would never start
  end
  if rival then
    displace(rival)
    cancel(rival, 'replaced')
  end
  if job.plain and run_at <= now then
    call('RPUSH', W, job.inc .. id)
    add('n:' .. name, 1)
    woken = true
    note(id)
  else
    local o = job.o
    job.b[RUN_AT] = run_at
    if owner then follow(job, owner) else take_key(job) end
    if o.ttl then call('ZADD', TTL, now + o.ttl, id) end
    local waits_for = o.depends_on or {}
    for _, key in ipairs(waits_for) do
      if call('ZADD', UNMET, 0, id .. NUL .. key[1] .. NUL .. key[2]) == 1 then
        job.unmet = true
        send(key[1], {'await', key[2], id, job.inc, o.on_dependency_failure or 'fail'})
      end
    end
    place(job)
    save(job) --@ enqueue: failed|cancelled -> waiting|delayed|blocked
  end
  tell(id, name, 'queued', NAMES[job.state])
  return {'queued', id, rival and rival.id or nil}
end

local function enqueue(id, rest, result_key, log_key)
  local there = load(id)
  if there and is_over(there) then
    remove(there, result_key, log_key)
    there = nil
  end
  if there and there.state == COMPLETED then
    return {'completed', id, 'completed', call('GET', result_key)}
  end
  if there and there.state ~= FAILED and there.state ~= CANCELLED then
    return {'duplicate', id, NAMES[there.state]}
  end
  local options = decode(sub(rest, 8 + #name, 7 + #name + unpack_number('>I4', rest, 4 + #name)))
  local key, policy = options.unique_key, options.on_duplicate or 'keep'
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
  if there then
    remove(there, result_key, log_key, true)
  end
  return create(id, rest, result_key, log_key, rival, owner)
end

for i = 0, many - 1 do
  replies[i + 1] = enqueue(ARGV[first + 2 * i], ARGV[first + 2 * i + 1], KEYS[FIXED + 2 * i + 1], KEYS[FIXED + 2 * i + 2])
end
return answer(replies)
