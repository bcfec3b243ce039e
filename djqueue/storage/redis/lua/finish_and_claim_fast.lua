-- Finish jobs and claim the next ones, as long as only plain jobs and the list of waiting jobs are concerned.
--
-- Checks that first. If not, it changes nothing and replies 'full': the caller then runs finish_and_claim. Most of
-- the time of a long script goes into creating its functions, so this one has few.
--
-- KEYS: of each outcome, the job's result.
-- ARGV: number of outcomes, worker, slots, lease, maximum number of dead letters, the worker's job names (MessagePack),
--   the configured rate (capacity, per) and concurrency (each '' for none); then of each outcome its kind (c or n), id,
--   token and result.
-- Returns {'done' or 'full', a flag for each outcome, last token, milliseconds until the next job may be claimable or -1,
--   number of dead letters above the maximum, claims (id, record, ''), time}; to a repeated request 'again' and the ids.
--! include base rates complete
--! keys w z unhandled due lease dead deps

local outcomes, worker, slots = tonumber(ARGV[ARGS]), ARGV[ARGS + 1], tonumber(ARGV[ARGS + 2])
local first = ARGS + 9
local FULL = {0, {'full'}}

if call('ZCARD', Z) > 0 or call('ZCARD', UNHANDLED) > 0 or call('ZCARD', DEPS) > 0 then return FULL end
local limits = call('HMGET', META, 'limited', 'capacity', 'per', 'concurrency', 'paused', 'held', 'bounds', 'bucket', 'parts', 'filled')
if limits[5] or limits[6] or limits[7] then return FULL end
local due = call('ZRANGE', DUE, 0, 0, 'WITHSCORES')
if due[2] and tonumber(due[2]) <= now then return FULL end

-- Check the outcomes.
local ids, sts, seen = {}, {}, {}
if outcomes > 0 then
  for i = 1, outcomes do ids[i] = ARGV[first + 4 * i - 3] end
  sts = call('HMGET', ST, unpack(ids))
  for i = 1, outcomes do
    local st = sts[i]
    if not st or sub(st, 1, 1) ~= ACTIVE or sub(st, 2, 9) ~= ARGV[first + 4 * i - 2] then return FULL end
    if seen[st] then return FULL end -- the same job twice
    seen[st] = true
  end
end

-- Limit the number of claims by rate and concurrency.
local capacity, per, concurrency = limits_of(limits, ARGV[ARGS + 6], ARGV[ARGS + 7], ARGV[ARGS + 8])
local parts, free_before, free
if capacity then
  parts = parts_of(capacity, per, limits[8], limits[9], limits[10])
  slots = math.min(slots, floor(parts / per))
end
if concurrency then
  free_before = concurrency - call('ZCARD', LEASE) - (call('HGET', COUNT, 'e') or 0)
  free = free_before + outcomes
  slots = math.min(slots, free)
end

-- Check the next jobs.
local entries, wanted, blobs, name = {}, {}, {}, nil
if slots > 0 then
  entries = call('LRANGE', W, 0, slots - 1)
  local count = #entries
  if count > 0 then
    for i = 1, count do
      if entries[i] == '' then return FULL end
      wanted[i] = sub(entries[i], 9)
    end
    blobs = call('HMGET', JOBS, unpack(wanted))
    local existing = call('HMGET', ST, unpack(wanted))
    local heading
    for i = 1, count do
      local blob = blobs[i]
      if not blob or existing[i] then return FULL end
      -- The flag, the name's length and the name: the first job's are those of all others.
      if not heading then
        name = name_of(blob)
        heading = sub(blob, 17, 19 + #name)
        if sub(heading, 1, 1) ~= 'p' then return FULL end
        local handled = false
        for _, one in ipairs(decode(ARGV[ARGS + 5])) do handled = handled or one == name end
        if not handled then return FULL end
      elseif sub(blob, 17, 16 + #heading) ~= heading then
        return FULL
      end
    end
  end
end

-- Everything is checked: apply the changes.
if outcomes > 0 then
  for i = 1, outcomes do
    local at = first + 4 * (i - 1)
    complete_plain(ids[i], sts[i], KEYS[FIXED + i], ARGV[at] == 'c' and ARGV[at + 3])
  end
  write_completed(0)
end

local base, claimed = 0, {}
local count = #entries
if count > 0 then
  base = next_numbers('token', count) - 1
  local body = encode({1, 0, 0, worker, now, 0, '', '', '', '', 0, 0})
  local expires, leases = string.format('%.0f', now + tonumber(ARGV[ARGS + 3])), {}
  for i = 1, count do
    local id = wanted[i]
    local n = #st_changes
    st_changes[n + 1], st_changes[n + 2] = id, ACTIVE .. pack('>I8', base + i) .. body --@ claim: waiting -> active
    leases[2 * i - 1], leases[2 * i] = expires, id
    claimed[3 * i - 2], claimed[3 * i - 1], claimed[3 * i] = id, blobs[i], ''
    note(id, ACTIVE)
    if watching then emit_event(id, name, 'active', 'active') end
  end
  call('LPOP', W, count)
  variadic('ZADD', LEASE, leases)
  add('n:' .. name, -count)
end
variadic('HSET', ST, st_changes)

local wait = due[2] and math.max(0, tonumber(due[2]) - now) or -1
if capacity then
  parts = parts - count * per
  if count > 0 then store_bucket(META, 'bucket', capacity, per, parts) end
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
-- Workers that found no free slot learn of those that are left.
if free and free_before <= 0 and free > count and call('LLEN', W) > 0 then woken = true end
unchanged = outcomes == 0 and count == 0
local flags = string.rep('1', outcomes)
local overflow = math.max(0, call('ZCARD', DEAD) - tonumber(ARGV[ARGS + 4]))
local last = string.format('%.0f', base)
local at = string.format('%.0f', now)
return answer({'done', flags, last, wait, overflow, claimed, at}, {'again', flags, last, wait, overflow, wanted, at})
