-- Commit, touch, mark, close, leave, drop or adopt plans of bulk writes: see `djqueue.storage.staging`.
--
-- A publisher marks a plan, checks that all queues are published, and then closes it if the mark is still there. After a
-- failover that has lost any of this, it is not.
--
-- A plan is dropped in steps, because its queues are elsewhere: 'dropping' closes it to publishers, or 'withdrawing', which
-- fails if a sweep has adopted it; then its queues are cleared, and 'drop' deletes it, or 'keep' opens it again. After a
-- crash, whoever finds a plan that is being dropped repeats the steps.
--
-- KEYS: the plan, except for 'silent'.
-- ARGV: 1 the time; the operation; for 'silent' milliseconds of silence and the maximum number of plans; for the others
--   the plan's name; except for 'adopt' its version and write; for 'commit' also its queues, lifetime, limit and '1' for a batch
--   of a stream; for 'mark' the mark; for 'close' the counts and the mark, or ''.
-- Returns for 'commit' {result, version, write, queues, lifetime, limit, batch, counts}; for 'silent' the
--   names; for 'adopt' as for 'commit', with the plan's state, or {} if it is not there; for 'leave' 2 if the plan was left
--   long ago; for 'close' 2 if the mark is missing; else 1, or 0 if another plan is stored or the operation is not possible.
--! include common versions
--! keys open_writes

local RESUMABLE = 7 * DAY -- how long an unfinished publication can be resumed
local MARK = 'mark:' -- prefix of the fields of marks
local operation = ARGV[2]

if operation == 'silent' then
  -- A sign of life that lies in the future is from before the clock was set back.
  for _, name in ipairs(call('ZRANGEBYSCORE', OPEN_WRITES, '(' .. now, '+inf', 'LIMIT', 0, ARGV[4])) do
    call('ZADD', OPEN_WRITES, now, name)
  end
  local names = call('ZRANGEBYSCORE', OPEN_WRITES, 0, now - tonumber(ARGV[3]), 'LIMIT', 0, ARGV[4])
  local left = call('ZRANGEBYSCORE', OPEN_WRITES, -now, '(0', 'LIMIT', 0, ARGV[4] - #names)
  for _, name in ipairs(left) do names[#names + 1] = name end
  for _, name in ipairs(names) do call('ZADD', OPEN_WRITES, now, name) end
  return names
end

local key, name, version = KEYS[FIXED + 1], ARGV[3], ARGV[4]
local stored = call('HMGET', key, 'version', 'write', 'state')
local last, state = stored[1], stored[3]

local function described(result)
  local found = call('HMGET', key, 'version', 'write', 'queues', 'lifetime', 'limit', 'batch', 'counts')
  for i = 1, 7 do found[i] = found[i] or '' end
  return {result, unpack(found)}
end

if operation == 'adopt' then
  if not last or state == 'done' then
    call('ZREM', OPEN_WRITES, name) -- it has expired
    return {}
  end
  if state == 'open' then call('HSET', key, 'adopted', 1) end
  return described(state)
end

if operation == 'commit' then
  local result
  if last and (state == 'done' and last == version or is_later(last, version)) then
    result = 'done'
  elseif last and state == 'dropping' then
    result = 'dropping'
  elseif last and state == 'open' then
    result = last == version and (stored[2] == ARGV[5] and 'new' or 'resumed') or 'unfinished'
    call('ZADD', OPEN_WRITES, now, name)
  else
    result = 'new'
    call('HSET', key, 'version', ARGV[4], 'write', ARGV[5], 'state', 'open', 'queues', ARGV[6], 'lifetime', ARGV[7],
      'limit', ARGV[8], 'batch', ARGV[9])
    call('HDEL', key, 'counts', 'adopted', 'left')
    -- A plan without a name of its own cannot be resumed later.
    if ARGV[7] == '' then call('PERSIST', key) else call('PEXPIRE', key, RESUMABLE) end
    call('ZADD', OPEN_WRITES, now, name)
  end
  return described(result)
end

if last ~= version or stored[2] ~= ARGV[5] then
  if operation == 'drop' then return 1 end -- another process has dropped it
  if operation == 'leave' and not last then call('ZREM', OPEN_WRITES, name) end
  return 0
end
if operation == 'dropping' or operation == 'withdrawing' then
  if state == 'dropping' then return 1 end -- the reply was lost, or its process has died
  if state ~= 'open' or operation == 'withdrawing' and call('HEXISTS', key, 'adopted') == 1 then return 0 end
  call('HSET', key, 'state', 'dropping')
  return 1
end
if operation == 'drop' or operation == 'keep' then
  if state ~= 'dropping' then return 0 end
  if operation == 'keep' then
    call('HSET', key, 'state', 'open')
  else
    call('DEL', key)
    call('ZREM', OPEN_WRITES, name)
  end
  return 1
end
if state ~= 'open' then return 0 end
if operation == 'touch' then
  call('ZADD', OPEN_WRITES, 'XX', now, name)
  if call('HGET', key, 'lifetime') ~= '' then call('PEXPIRE', key, RESUMABLE) end
elseif operation == 'mark' then
  call('HSET', key, MARK .. ARGV[6], 1)
elseif operation == 'close' then
  if ARGV[7] ~= '' and call('HEXISTS', key, MARK .. ARGV[7]) == 0 then return 2 end
  for _, field in ipairs(call('HKEYS', key)) do
    if string.sub(field, 1, #MARK) == MARK then call('HDEL', key, field) end
  end
  local lifetime = call('HGET', key, 'lifetime')
  call('HSET', key, 'state', 'done', 'counts', ARGV[6])
  call('HDEL', key, 'queues')
  call('ZREM', OPEN_WRITES, name)
  if lifetime ~= '' then call('PEXPIRE', key, lifetime) end
elseif operation == 'leave' then
  call('HSETNX', key, 'left', now)
  if tonumber(call('HGET', key, 'left')) <= now - RESUMABLE then return 2 end
  -- The negative time at which sweeps may adopt it again: no sign of life.
  call('ZADD', OPEN_WRITES, -(now + RESUMABLE), name)
end
return 1
