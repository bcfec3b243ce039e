-- Finish jobs and claim the next ones, as long as their ends and claims concern only what all jobs have.
--
-- Checks that first. If not, it changes nothing (but removes holes of the list) and replies 'full', or 'due' if delayed
-- jobs are due: the caller then runs finish_and_claim. Calls and functions take most of its time, so it has few of both.
--
-- KEYS: of each outcome, the job's result.
-- ARGV: number of outcomes, worker, slots, lease, the worker's job names (each after a NUL, and one at the end), the
--   configured rate (capacity, per) and concurrency (each '' for none); then of each outcome its kind (c or n), id, token
--   and result.
-- Returns {'done', 'full' or 'due', a flag for each outcome, last token, milliseconds until the next job may be claimable
--   or -1, 0, claims (id, record, counters or ''), time}; to a repeated request 'again' and the ids.
--! include base rates complete
--! keys w z unhandled due lease deps

local outcomes, worker, slots = tonumber(ARGV[ARGS]), ARGV[ARGS + 1], tonumber(ARGV[ARGS + 2])
local names, claims = ARGV[ARGS + 4], slots > 0
local first = ARGS + 8
local FULL = {0, {'full'}}

local limits = call('HMGET', META, 'paused', 'held', 'bounds', 'limited')
if limits[1] or limits[2] or limits[3] then return FULL end
local due = call('ZRANGE', DUE, 0, 0, 'WITHSCORES')
if due[2] and tonumber(due[2]) <= now then return {0, {'due'}} end

-- Check the outcomes' jobs for dependents, and the jobs of other workers for some of this one.
local has_priorities = false
if call('EXISTS', Z, UNHANDLED, DEPS) > 0 then
  has_priorities = call('EXISTS', Z) == 1
  if call('EXISTS', DEPS) == 1 then
    for i = 1, outcomes do
      local id = ARGV[first + 4 * i - 3]
      if call('ZRANGEBYLEX', DEPS, '[' .. id .. NUL, '(' .. id .. AFTER, 'LIMIT', 0, 1)[1] then return FULL end
    end
  end
  local after, looks = '-', claims and 0 or 9
  while looks < 9 do
    local entry = call('ZRANGEBYLEX', UNHANDLED, after, '+', 'LIMIT', 0, 1)[1]
    if not entry then break end
    local name = string.match(entry, '^%z?([^%z]*)%z')
    if looks == 8 or string.find(names, NUL .. name .. NUL, 1, true) then return FULL end
    looks, after = looks + 1, '(' .. (sub(entry, 1, 1) == NUL and NUL or '') .. name .. AFTER
  end
end

-- Limit the number of claims by rate and concurrency.
local capacity, per, concurrency = ARGV[ARGS + 5], ARGV[ARGS + 6], ARGV[ARGS + 7]
local parts, free_before, free
if limits[4] or capacity .. concurrency ~= '' then
  local stored = call('HMGET', META, 'limited', 'capacity', 'per', 'concurrency', 'bucket', 'parts', 'filled')
  capacity, per, concurrency = limits_of(stored, capacity, per, concurrency)
  if capacity then
    parts = parts_of(capacity, per, stored[5], stored[6], stored[7])
    slots = math.min(slots, floor(parts / per))
  end
  if concurrency then
    free_before = concurrency - call('ZCARD', LEASE) - (call('HGET', COUNT, 'e') or 0)
    free = free_before + outcomes
    slots = math.min(slots, free)
  end
else
  capacity, concurrency = nil, nil
end

-- Take the next jobs: those of higher priorities, those of the list, those of lower ones.
local wanted, popped, holes, prioritized = {}, {}, 0, {}
local function take_prioritized(from, to)
  for _, entry in ipairs(call('ZRANGEBYLEX', Z, from, to, 'LIMIT', 0, slots - #wanted)) do
    prioritized[#prioritized + 1] = entry
    wanted[#wanted + 1] = sub(entry, 13)
  end
end
if slots > 0 then
  if has_priorities then take_prioritized('-', '(' .. pack('>I4', PRIORITY_BASE)) end
  local room = slots - #wanted
  while room > 0 do
    local entries = call('LPOP', W, room) or {}
    for i = 1, #entries do
      local entry = entries[i]
      if entry == '' then
        holes = holes + 1
      else
        popped[#popped + 1] = entry
        wanted[#wanted + 1] = sub(entry, 9)
      end
    end
    room = #entries == room and slots - #wanted or 0
  end
  if holes > 0 then call('HINCRBY', META, 'holes', -holes) end
  if has_priorities and #wanted < slots then take_prioritized('[' .. pack('>I4', PRIORITY_BASE), '+') end
end

local function undo()
  for i = #popped, 1, -1 do call('LPUSH', W, popped[i]) end
  return FULL
end

-- Check the outcomes and these jobs.
local count, ids, blobs, sts, seen = #wanted, {}, {}, {}, {}
for i = 1, outcomes do ids[i] = ARGV[first + 4 * i - 3] end
for i = 1, count do ids[outcomes + i] = wanted[i] end
if #ids > 0 then sts = call('HMGET', ST, unpack(ids)) end
for i = 1, outcomes do
  local st = sts[i]
  if not st or sub(st, 1, 1) ~= ACTIVE or sub(st, 2, 9) ~= ARGV[first + 4 * i - 2] then return undo() end
  if seen[st] then return undo() end -- the same job twice
  seen[st] = true
end
local named, bodies, started = {}, {}, {}
if count > 0 then
  blobs = call('HMGET', JOBS, unpack(wanted))
  local heading, name
  for i = 1, count do
    local blob, st = blobs[i], sts[outcomes + i]
    if not blob then return undo() end
    -- Jobs that are claimed together usually have one heading: the flag, the name's length and the name.
    if not heading or sub(blob, 17, 16 + #heading) ~= heading then
      name = name_of(blob)
      heading = sub(blob, 17, 19 + #name)
      if sub(heading, 1, 1) == 'x' or not string.find(names, NUL .. name .. NUL, 1, true) then return undo() end
    end
    if st then
      -- Attempts, failures, stalls, and so on: see job.lua.
      local body = decode(sub(st, 10))
      if sub(st, 1, 1) ~= WAITING or body[3] > 0 or #body > 12 then return undo() end
      bodies[i] = body
    end
    named[i] = name
    started[name] = (started[name] or 0) + 1
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
if count > 0 then
  base = next_numbers('token', count) - 1
  local new = encode({1, 0, 0, worker, now, 0, '', '', '', '', 0, 0})
  local expires, leases = string.format('%.0f', now + tonumber(ARGV[ARGS + 3])), {}
  local n = #st_changes
  for i = 1, count do
    local id, body, packed, counters = wanted[i], bodies[i], new, ''
    if body then
      body[1], body[4], body[5], body[11] = body[1] + 1, worker, now, 0
      packed, counters = encode(body), encode({body[1], body[2], body[3], body[6]})
    end
    st_changes[n + 1], st_changes[n + 2] = id, ACTIVE .. pack('>I8', base + i) .. packed --@ claim: waiting -> active
    n = n + 2
    leases[2 * i - 1], leases[2 * i] = expires, id
    claimed[3 * i - 2], claimed[3 * i - 1], claimed[3 * i] = id, blobs[i], counters
    note(id, ACTIVE)
    if watching then emit_event(id, named[i], 'active', 'active') end
  end
  if #prioritized > 0 then variadic('ZREM', Z, prioritized) end
  variadic('ZADD', LEASE, leases)
  for name, number in pairs(started) do add('n:' .. name, -number) end
end
variadic('HSET', ST, st_changes)

local wait = claims and due[2] and math.max(0, tonumber(due[2]) - now) or -1
if claims and capacity then
  parts = parts - count * per
  if count > 0 then store_bucket(META, 'bucket', capacity, per, parts) end
  if parts < per then
    for name in string.gmatch(names, '[^%z]+') do
      if call('HEXISTS', COUNT, 'n:' .. name) == 1 then
        local missing = math.ceil((per - parts) / capacity)
        if wait < 0 or missing < wait then wait = missing end
        break
      end
    end
  end
end
-- Workers that found no free slot learn of those that are left.
if free and free_before <= 0 and free > count and call('EXISTS', W, Z) > 0 then woken = true end
unchanged = outcomes == 0 and count == 0
local flags = string.rep('1', outcomes)
return answer({'done', flags, base, wait, 0, claimed, now}, {'again', flags, base, wait, 0, wanted, now})
