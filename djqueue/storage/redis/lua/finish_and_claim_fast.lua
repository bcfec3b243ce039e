-- Finish jobs and claim the next ones, as long as their ends and claims concern only what all jobs have.
--
-- Checks that first. If not, it changes nothing (but removes holes of the list) and replies 'full', or 'due' if delayed
-- jobs are due: the caller then runs finish_and_claim. Most calls finish and claim few jobs: calls and functions take
-- most of the time, so the script has few of both.
--
-- KEYS: of each job that was completed with a result, the result.
-- ARGV: number of completed jobs, worker, slots, lease, the worker's job names (each after a NUL, and one at the end),
--   '' or the configured capacity/per/concurrency ('' each for none), the outcomes (see completed_jobs.lua), their ids, of
--   which none occurs twice; then the results. The worker is encoded (MessagePack).
-- Returns {'done', 'plain' (done, and finish_and_claim_plain.lua can take the next call), 'full' or 'due', a flag for each
--   outcome, last token, milliseconds until the next job may be claimable or -1, 0, claims (id, record, counters or ''),
--   time}; to a repeated request 'again' and the ids.
--! include request numbers layout
--! keys w lease finished
--! rare z unhandled due deps

local format, byte, find = string.format, string.byte, string.find
local outcomes, worker, slots = tonumber(ARGV[ARGS]), ARGV[ARGS + 1], tonumber(ARGV[ARGS + 2])
local asked = slots
local names, claims = ARGV[ARGS + 4], slots > 0
local ends = ARGV[ARGS + 6]
local first = ARGS + 6 -- before the first id
local last = first + outcomes
local FULL = {0, {'full'}}

local limits = call('HMGET', META, 'paused', 'held', 'bounds', 'limited', 'token')
if limits[1] or limits[2] or limits[3] then return FULL end
-- Whether finish_and_claim_plain.lua can be used from now on.
local is_plain = rare == 0 and not watching and not limits[4]
local due
if rare > 0 then
  due = call('ZRANGE', DUE, '0', '0', 'WITHSCORES')[2]
  if due and tonumber(due) <= now then return {0, {'due'}} end
  if due then rare = rare - 1 end
end

-- Check the outcomes' jobs for dependents, and the jobs of other workers for some of this one.
local has_priorities = false
if rare > 0 then
  has_priorities = call('EXISTS', Z) == 1
  if has_priorities then rare = rare - 1 end
end
if rare > 0 then
  if call('EXISTS', DEPS) == 1 then
    rare = rare - 1
    for i = first + 1, last do
      if call('ZRANGEBYLEX', DEPS, '[' .. ARGV[i] .. NUL, '(' .. ARGV[i] .. AFTER, 'LIMIT', 0, 1)[1] then return FULL end
    end
  end
  local after, looks = '-', 0
  while rare > 0 and claims and looks < 9 do
    local entry = call('ZRANGEBYLEX', UNHANDLED, after, '+', 'LIMIT', 0, 1)[1]
    if not entry then break end
    local name = string.match(entry, '^%z?([^%z]*)%z')
    if looks == 0 then rare = rare - 1 end
    if looks == 8 or find(names, NUL .. name .. NUL, 1, true) then return FULL end
    looks, after = looks + 1, '(' .. (sub(entry, 1, 1) == NUL and NUL or '') .. name .. AFTER
  end
end
has_outbox = rare > 0

-- Limit the number of claims by rate and concurrency.
local capacity, per, concurrency, parts, free_before, free
if limits[4] or ARGV[ARGS + 5] ~= '' then
  --! insert rates
  capacity, per, concurrency = string.match(ARGV[ARGS + 5], '^(.*)/(.*)/(.*)$')
  local stored = call('HMGET', META, 'limited', 'capacity', 'per', 'concurrency', 'bucket', 'parts', 'filled')
  capacity, per, concurrency = limits_of(stored, capacity, per, concurrency)
  if capacity then
    parts = parts_of(capacity, per, stored[5], stored[6], stored[7])
    slots = math.min(slots, floor(parts / per))
  end
  if concurrency then
    free_before = concurrency - call('ZCARD', LEASE) - (call('HGET', META, 'e') or 0)
    free = free_before + outcomes
    slots = math.min(slots, free)
  end
end

-- Take the next jobs: those of higher priorities, those of the list, those of lower ones.
local wanted, popped, holes, prioritized = {}, nil, 0, nil
if slots > 0 then
  local take_prioritized
  if has_priorities then
    prioritized = {}
    function take_prioritized(from, to)
      for _, entry in ipairs(call('ZRANGEBYLEX', Z, from, to, 'LIMIT', 0, slots - #wanted)) do
        prioritized[#prioritized + 1] = entry
        wanted[#wanted + 1] = sub(entry, 13)
      end
    end
    take_prioritized('-', '(' .. pack('>I4', PRIORITY_BASE))
  end
  local room = slots - #wanted
  while room > 0 do
    -- A number would be converted, which takes longer than to choose the argument.
    local entries = call('LPOP', W, room == asked and ARGV[ARGS + 2] or format('%d', room)) or {}
    local taken, n = #entries, #wanted
    for i = 1, taken do
      local entry = entries[i]
      if entry == '' then
        holes = holes + 1
      else
        n = n + 1
        wanted[n] = sub(entry, 9)
      end
    end
    popped = {before = popped, entries = entries}
    room = taken == room and slots - n or 0
  end
  if holes > 0 then call('HINCRBY', META, 'holes', -holes) end
  if has_priorities and #wanted < slots then take_prioritized('[' .. pack('>I4', PRIORITY_BASE), '+') end
end

-- Check the outcomes and these jobs.
local count, ids, blobs, sts, refused = #wanted, {unpack(ARGV, first + 1, last)}, nil, nil, false
for i = 1, count do ids[outcomes + i] = wanted[i] end
if outcomes + count > 0 then sts = call('HMGET', ST, unpack(ids)) end
for i = 1, outcomes do
  if not sts[i] or find(sts[i], sub(ends, 10 * i - 8, 10 * i), 1, true) ~= 1 then refused = true end
end
local bodies, started = nil, nil
if count > 0 and not refused then
  blobs, started = call('HMGET', JOBS, unpack(wanted)), {}
  local heading, name, run = nil, nil, 0
  for i = 1, count do
    local blob, st = blobs[i], sts[outcomes + i]
    if not blob then refused = true break end
    -- Jobs that are claimed together usually have one heading: the flag, the name's length and the name.
    if not heading or find(blob, heading, 17, true) ~= 17 then
      if name then started[name], run = (started[name] or 0) + run, 0 end
      name = name_of(blob)
      heading = sub(blob, 17, 19 + #name)
      if byte(heading) == NOT_PLAIN_BYTE or not find(names, NUL .. name .. NUL, 1, true) then refused = true break end
    end
    run = run + 1
    if st then
      -- Attempts, failures, stalls, and so on: see job.lua.
      local body = decode(sub(st, 10))
      if sub(st, 1, 1) ~= WAITING or body[3] > 0 or #body > 12 then refused = true break end
      bodies = bodies or {}
      bodies[i] = body
    end
  end
  if name then started[name] = (started[name] or 0) + run end
end
if refused then
  while popped do
    local entries = popped.entries
    for i = #entries, 1, -1 do
      if entries[i] ~= '' then call('LPUSH', W, entries[i]) end
    end
    popped = popped.before
  end
  return FULL
end

-- Everything is checked: apply the changes.
local st_changes, n = {nil, nil, nil, nil}, 0 -- with room for one outcome and one claim
if outcomes > 0 then
  --! insert completed_jobs
  call('HINCRBY', META, COMPLETED, ARGV[ARGS])
end

local base, claimed, leases = 0, {}, nil
if count > 0 then
  -- As `next_numbers` does, in one call.
  base = math.max(tonumber(limits[5] or 0), now * 2048)
  if is_plain then
    call('HSET', META, 'token', format('%d', base + count), 'plain', '1')
  else
    call('HSET', META, 'token', format('%d', base + count))
  end
  -- The encoding of {1, 0, 0, worker, now, 0, '', '', '', '', 0, 0}.
  local new = '\156\1\0\0' .. worker .. '\207' .. pack('>I8', now) .. '\0\160\160\160\160\0\0'
  local expires = format('%d', now + ARGV[ARGS + 3])
  leases = {'0', '', nil, nil} -- the first two for leases.lua
  for i = 1, count do
    local id, body, packed, counters, at = wanted[i], bodies and bodies[i], new, '', 2 * i
    if body then
      body[1], body[4], body[5], body[11] = body[1] + 1, decode(worker), now, 0
      packed, counters = encode(body), encode({body[1], body[2], body[3], body[6]})
    end
    leases[at + 1], leases[at + 2] = expires, id
    st_changes[n + 1], st_changes[n + 2] = id, pack('>c1I8c0', ACTIVE, base + i, packed) --@ claim: waiting -> active
    n = n + 2
    at = 3 * i
    claimed[at - 2], claimed[at - 1], claimed[at] = id, blobs[i], counters
  end
  if prioritized and #prioritized > 0 then call('ZREM', Z, unpack(prioritized)) end
  for name, number in pairs(started) do add('n:' .. name, number == asked and '-' .. ARGV[ARGS + 2] or -number) end
end
--! insert leases
if n > 0 then call('HSET', ST, unpack(st_changes, 1, n)) end --@ claim: waiting -> active

local wait = claims and due and math.max(0, tonumber(due) - now) or -1
if claims and capacity then
  --! insert rates
  parts = parts - count * per
  if count > 0 then store_bucket(META, 'bucket', capacity, per, parts) end
  if parts < per then
    for name in string.gmatch(names, '[^%z]+') do
      if call('HEXISTS', META, 'n:' .. name) == 1 then
        local missing = math.ceil((per - parts) / capacity)
        if wait < 0 or missing < wait then wait = missing end
        break
      end
    end
  end
end
-- Workers that found no free slot learn of those that are left.
if free and free_before <= 0 and free > count and call('EXISTS', W, Z) > 0 then woken = true end

if watching then
  --! insert watched
  for i = 1, outcomes do
    if is_watched(ids[i]) then emit_event(ids[i], name_of(call('HGET', JOBS, ids[i])), 'completed', 'completed') end
  end
  for i = 1, count do emit_event(wanted[i], name_of(blobs[i]), 'started', 'active') end
end

-- Claims change the number of the last token, which pages compare like the version.
unchanged = outcomes == 0 or count > 0
local flags, packed, states, reported = string.rep('1', outcomes), '', nil, nil
local reply = {is_plain and count > 0 and 'plain' or 'done', flags, base, wait, 0, claimed, now}
if n > 0 then
  states = string.rep(COMPLETED, outcomes) .. string.rep(ACTIVE, count)
  --! insert packed_ids
end
-- A repetition gets the ids of the claims from those of all changed jobs. This is what `encode` would make of
-- {0, {'again', flags, base, wait, 0, packed, now}}, but made at once: Lua hashes every string.
local memory = ARGV[2] .. '\146\0\151\165again' .. encode(flags, base, wait, 0)
  .. pack('>c1I4', '\219', #packed) .. packed .. pack('>c1I8', '\207', now)
--! insert answer
