-- Remove jobs that are not active.
--
-- KEYS: of each job, its result, its log lines and its items.
-- ARGV: the mode, its number, the states (MessagePack), the configuration of groups; then the ids.
--   Modes: 'any'; 'over' (expired); 'dead' (dead letters above a number); 'surplus' (records of these states above a
--   number), 'heavy' (the same above a number of bytes); 'clean' (jobs in these states that ended or were enqueued before
--   a time); 'gone' (keys that removed jobs left).
-- Returns for each 1 or 0.
--! include base job ready completion removal

local mode, bound, states = ARGV[ARGS], tonumber(ARGV[ARGS + 1]), decode(ARGV[ARGS + 2])
configure_groups(ARGV[ARGS + 3])
local wanted = {}
for _, state in ipairs(states) do wanted[state] = true end

local function may_go(job)
  if not job or job.state == ACTIVE then return false end
  if mode == 'gone' then return false end
  if mode == 'over' then return is_over(job) end
  if mode == 'dead' then return job.state == FAILED and call('ZCARD', DEAD) > bound end
  if mode == 'surplus' or mode == 'heavy' then
    if not wanted[NAMES[job.state]] or keep.is_held(job) then return false end
    local is_heavy, code = mode == 'heavy', job.state
    local found = call('HMGET', META, is_heavy and 'B' .. code or code, is_heavy and 'Br' or 'h' .. code)
    local count, more = tonumber(found[1]) or 0, tonumber(found[2]) or 0
    if not is_heavy then return count - more > bound end
    return count + (code == COMPLETED and more or 0) > bound
  end
  if mode == 'clean' then return wanted[NAMES[job.state]] and (job.finished or job.created) < bound end
  return true
end

-- Ask the queues of the dependents whether they still need a held record, if that is due.
local HOLDERS = 100
local function check_holders(job, result_key)
  local at = ENDED[job.state] and keep.is_held(job) and call('ZSCORE', FINISHED, job.id)
  if not at or tonumber(at) > now then return end
  call('ZADD', FINISHED, now + DAY, job.id)
  if not has_entries(DEPS, job.id) then call('ZREM', HOLDS, job.id .. NUL) end
  keep.release_record(job.id, result_key)
  local holders = call('ZRANGEBYLEX', HOLDS, '[' .. job.id .. NUL, '(' .. job.id .. AFTER, 'LIMIT', 0, HOLDERS)
  for _, entry in ipairs(holders) do
    if #entry > #job.id + 1 then
      local who = decode(sub(entry, #job.id + 2))
      send(who[1], {'asked', job.id, who[2], who[3], who[4]})
    end
  end
end

local replies = {}
for i = ARGS + 4, #ARGV do
  local job, key = load(ARGV[i]), FIXED + 3 * (i - ARGS - 4)
  local goes = may_go(job)
  if goes then remove(job, KEYS[key + 1], KEYS[key + 2], KEYS[key + 3]) end
  if job and mode == 'over' then check_holders(job, KEYS[key + 1]) end
  if not job and mode == 'gone' then call('UNLINK', KEYS[key + 1], KEYS[key + 2], KEYS[key + 3]) end
  replies[#replies + 1] = goes and 1 or 0
end
return answer(replies)
