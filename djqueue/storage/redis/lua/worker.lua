-- The live workers.
--
-- ARGV: 1 the time, 2 the operation, and
--   register    id, its description, when it started: returns the commands for it, which are removed
--   unregister  id
--   list        milliseconds after which a silent worker is removed, and after which a dump is: returns description and
--               time of the last heartbeat of each worker
--   control     id, a command, milliseconds after which a silent worker counts as gone: returns what becomes of the command
--   save_dump   id, a text: returns 1 if the worker exists
--   dump        id, milliseconds after which a dump is removed: returns its time and text, or nothing
-- Commands are stored as a list (MessagePack): when the worker started that they are for, then the commands.
--! include common
--! keys workers heartbeats commands dumps dump_times

local operation, id = ARGV[2], ARGV[3]
local STARTED, STATE = 7, 10 -- positions in a worker's description

local function exactly(number)
  return string.format('%.0f', number)
end

local function forget(gone)
  call('HDEL', WORKERS, gone)
  call('ZREM', HEARTBEATS, gone)
  call('HDEL', COMMANDS, gone)
  call('HDEL', DUMPS, gone)
  call('ZREM', DUMP_TIMES, gone)
end

local function register(description, started)
  call('HSET', WORKERS, id, description)
  call('ZADD', HEARTBEATS, now, id)
  local waiting = call('HGET', COMMANDS, id)
  if not waiting then
    return {}
  end
  call('HDEL', COMMANDS, id)
  waiting = cmsgpack.unpack(waiting)
  -- Commands for an earlier worker with this id are dropped.
  return table.remove(waiting, 1) == started and waiting or {}
end

local function control(command, silence)
  local description, seen_at = call('HGET', WORKERS, id), call('ZSCORE', HEARTBEATS, id)
  if not description or not seen_at or tonumber(seen_at) < now - silence then
    return 'not_found'
  end
  description = cmsgpack.unpack(description)
  local started, is_stopping = description[STARTED], description[STATE] == 'stopping'
  local waiting = call('HGET', COMMANDS, id)
  waiting = waiting and cmsgpack.unpack(waiting) or {started}
  local left = {started}
  if waiting[1] == started then
    for i = 2, #waiting do
      local one = waiting[i]
      is_stopping = is_stopping or one == 'stop'
      -- Only a dump and the last other command remain.
      if one ~= command and (one == 'dump' or command == 'dump') then
        left[#left + 1] = one
      end
    end
  end
  if is_stopping and command ~= 'dump' then
    return 'stopping'
  end
  left[#left + 1] = command
  call('HSET', COMMANDS, id, cmsgpack.pack(left))
  return 'asked'
end

local function list(silence, age)
  for _, gone in ipairs(call('ZRANGEBYSCORE', HEARTBEATS, '-inf', '(' .. exactly(now - silence))) do
    forget(gone)
  end
  for _, over in ipairs(call('ZRANGEBYSCORE', DUMP_TIMES, '-inf', exactly(now - age))) do
    call('HDEL', DUMPS, over)
    call('ZREM', DUMP_TIMES, over)
  end
  local replies = {}
  local seen = call('ZRANGE', HEARTBEATS, 0, -1, 'WITHSCORES')
  for i = 1, #seen, 2 do
    local info = call('HGET', WORKERS, seen[i])
    if info then
      replies[#replies + 1] = info
      replies[#replies + 1] = seen[i + 1]
    end
  end
  return replies
end

local function save_dump(text)
  if call('HEXISTS', WORKERS, id) == 0 then
    return 0
  end
  call('HSET', DUMPS, id, text)
  call('ZADD', DUMP_TIMES, now, id)
  return 1
end

local function dump(age)
  local at = call('ZSCORE', DUMP_TIMES, id)
  if not at or tonumber(at) <= now - age then
    return {}
  end
  return {at, call('HGET', DUMPS, id)}
end

if operation == 'register' then
  return register(ARGV[4], tonumber(ARGV[5]))
elseif operation == 'unregister' then
  forget(id)
  return {}
elseif operation == 'list' then
  return list(tonumber(ARGV[3]), tonumber(ARGV[4]))
elseif operation == 'control' then
  return control(ARGV[4], tonumber(ARGV[5]))
elseif operation == 'save_dump' then
  return save_dump(ARGV[4])
end
return dump(tonumber(ARGV[4]))
