-- What `work` does where nothing but plain jobs is concerned: it ends some and claims the next.
--
-- Takes no more than a look to see whether that is so; if not, it changes nothing and answers 'full', and
-- `work` is called. Most of a long script's time goes into making its functions, so this one has few.
-- Arguments: number of outcomes, worker, slots, lease, the most dead letters, the worker's job names
-- (MessagePack), the rate that the settings set (capacity, per) and the concurrency (each '' for none); then for
-- each outcome its kind (c or n), id, token and result. Keys: of each, its result.
--! include base
--! keys w z asides due lease finished dead deps

local outcomes, worker, slots = tonumber(ARGV[ARGS]), ARGV[ARGS + 1], tonumber(ARGV[ARGS + 2])
local first = ARGS + 9
local FULL = {0, {'full'}}

if call('ZCARD', Z) > 0 or call('ZCARD', ASIDES) > 0 or call('ZCARD', DEPS) > 0 then return FULL end
local limits = call('HMGET', META, 'paused', 'limited', 'capacity', 'per', 'concurrency', 'bucket', 'parts', 'filled', 'held', 'bounds')
if limits[1] or limits[9] or limits[10] then return FULL end
local due = call('ZRANGE', DUE, 0, 0, 'WITHSCORES')
if due[2] and tonumber(due[2]) <= now then return FULL end

-- Look at what has ended.
local ids, sts, seen = {}, {}, {}
if outcomes > 0 then
  for i = 1, outcomes do ids[i] = ARGV[first + 4 * i - 3] end
  sts = call('HMGET', ST, unpack(ids))
  for i = 1, outcomes do
    local st = sts[i]
    if not st or byte(st) ~= 97 or sub(st, 2, 9) ~= ARGV[first + 4 * i - 2] then return FULL end
    if seen[st] then return FULL end -- the same one twice
    seen[st] = true
  end
end

-- How many may start: the queue's own limits, set while it ran, or those of the settings; see `work`.
local capacity, per, concurrency, parts, room_before, room
if limits[2] then
  capacity, per, concurrency = tonumber(limits[3]), tonumber(limits[4]), tonumber(limits[5])
elseif ARGV[ARGS + 6] ~= '' or ARGV[ARGS + 8] ~= '' then
  capacity, per, concurrency = tonumber(ARGV[ARGS + 6]), tonumber(ARGV[ARGS + 7]), tonumber(ARGV[ARGS + 8])
end
if capacity then
  parts = capacity * per
  if limits[6] == capacity .. '/' .. per then
    parts = math.min(parts, tonumber(limits[7]) + math.max(0, now - tonumber(limits[8])) * capacity)
  end
  slots = math.min(slots, floor(parts / per))
end
if concurrency then
  room_before = concurrency - call('ZCARD', LEASE) - (call('HGET', COUNT, 'e') or 0)
  room = room_before + outcomes
  slots = math.min(slots, room)
end

-- Look at what is next.
local entries, wanted, blobs, name = {}, {}, {}, nil
if slots > 0 then
  entries = call('LRANGE', W, 0, slots - 1)
  local many = #entries
  if many > 0 then
    for i = 1, many do
      if entries[i] == '' then return FULL end
      wanted[i] = sub(entries[i], 9)
    end
    blobs = call('HMGET', JOBS, unpack(wanted))
    local there = call('HMGET', ST, unpack(wanted))
    local heading
    for i = 1, many do
      local blob = blobs[i]
      if not blob or there[i] then return FULL end
      -- The letter, the name's length and the name: of the first job, and the same of all others.
      if not heading then
        local length = unpack_number('>I2', blob, 18)
        heading, name = sub(blob, 17, 19 + length), sub(blob, 20, 19 + length)
        if byte(heading) ~= 112 then return FULL end
        local handled = false
        for _, one in ipairs(decode(ARGV[ARGS + 5])) do handled = handled or one == name end
        if not handled then return FULL end
      elseif sub(blob, 17, 16 + #heading) ~= heading then
        return FULL
      end
    end
  end
end

-- Nothing has been changed so far.
local noting = ARGV[5] ~= '0'
local changes, leases = {}, {}

if outcomes > 0 then
  local ending = pack('>I8I8', now, now + 3600000)
  local expires = string.format('%.0f', now + 3600000)
  local kept = {}
  for i = 1, outcomes do
    local id, st, at = ids[i], sts[i], first + 4 * (i - 1)
    changes[2 * i - 1] = id
    changes[2 * i] = 'c' .. sub(st, 2, 9) .. ending .. sub(st, 10) --@ complete: active -> completed
    kept[2 * i - 1], kept[2 * i] = expires, id
    if ARGV[at] == 'c' then
      call('SET', KEYS[FIXED + i], ARGV[at + 3], 'PX', '3600000')
    end
    if noting then note(id, 'c') end
    if watching then
      local blob = call('HGET', JOBS, id)
      tell(id, sub(blob, 20, 19 + unpack_number('>I2', blob, 18)), 'completed', 'completed')
    end
  end
  variadic('ZADD', FINISHED, kept)
  add('c', outcomes)
end

local base, claimed = 0, {}
local many = #entries
if many > 0 then
  base = numbers('token', many) - 1
  local body = encode({1, 0, 0, worker, now, 0, '', '', '', '', 0, 0})
  local lost_at = string.format('%.0f', now + tonumber(ARGV[ARGS + 3]))
  for i = 1, many do
    local id = wanted[i]
    local n = #changes
    changes[n + 1], changes[n + 2] = id, 'a' .. pack('>I8', base + i) .. body --@ claim: waiting -> active
    leases[2 * i - 1], leases[2 * i] = lost_at, id
    claimed[3 * i - 2], claimed[3 * i - 1], claimed[3 * i] = id, blobs[i], ''
    if noting then note(id, 'a') end
    if watching then tell(id, name, 'active', 'active') end
  end
  call('LPOP', W, many)
  variadic('ZADD', LEASE, leases)
  add('n:' .. name, -many)
end
variadic('HSET', ST, changes)
if outcomes > 0 then
  variadic('ZREM', LEASE, ids)
end

local wait = due[2] and math.max(0, tonumber(due[2]) - now) or -1
if capacity then
  parts = parts - many * per
  if many > 0 then
    local kept = string.format('%.17g', parts)
    call('HSET', META, 'bucket', capacity .. '/' .. per, 'parts', kept, 'filled', string.format('%.0f', now))
  end
  if parts < per then
    for _, one in ipairs(decode(ARGV[ARGS + 5])) do
      if call('HEXISTS', COUNT, 'n:' .. one) == 1 then
        local missing = math.ceil((per - parts) / capacity)
        if wait < 0 or missing < wait then wait = missing end
        break
      end
    end
  end
end
-- Those who found no room are told of what is left of it.
if room and room_before <= 0 and room > many and call('LLEN', W) > 0 then woken = true end
unchanged = outcomes == 0 and many == 0
local flags = string.rep('1', outcomes)
local overflow = math.max(0, call('ZCARD', DEAD) - tonumber(ARGV[ARGS + 4]))
local last = string.format('%.0f', base)
local at = string.format('%.0f', now)
return answer({'done', flags, last, wait, overflow, claimed, at}, {'again', flags, last, wait, overflow, wanted, at})
