-- Finish jobs and claim the next ones in a queue that is known to be plain: `meta` has `plain`.
--
-- finish_and_claim_fast.lua sets that field when it finds no jobs but those of the list, no limits, no subscribers and no
-- messages; every script that may add some removes it. So this one needs no other keys and few commands. If the queue or
-- one of the jobs is not plain, it changes nothing and replies 'full': the caller then runs the other script.
--
-- KEYS: of each job that was completed with a result, the result.
-- ARGV: those of finish_and_claim_fast.lua, but without the configured limits.
-- Returns its reply. It is remembered in `meta`, in a field with the name of the caller's sequence; see sweep.lua.
--! keys sequence meta jobs st log version w lease finished
--! include layout

local pack, encode, format, byte, find = struct.pack, cmsgpack.pack, string.format, string.byte, string.find
local outcomes, slots, names, tokens = tonumber(ARGV[6]), ARGV[8], ARGV[10], ARGV[12]
local first = 12 -- before the first id
local last = first + outcomes

local ids, wanted, entries = {unpack(ARGV, first + 1, last)}, {nil}, {}
if slots ~= '0' then entries = call('LPOP', W, slots) or entries end
local count = #entries
for i = 1, count do
  local id = sub(entries[i], 9)
  wanted[i], ids[outcomes + i] = id, id
end

-- Check the outcomes and the next jobs.
local is_plain, sts, blobs = true, nil, nil
if outcomes + count > 0 then sts = call('HMGET', ST, unpack(ids)) end
for i = 1, outcomes do
  local st = sts[i]
  if not st or byte(st) ~= ACTIVE_BYTE or find(st, sub(tokens, 8 * i - 7, 8 * i), 2, true) ~= 2 then is_plain = false end
end
-- What is read of `meta`: these fields, then the number of waiting jobs of each name that is claimed.
local fields, started, heading, name = {'plain', 'token', SEQUENCE, COMPLETED}, {}, nil, nil
if count > 0 then
  blobs = call('HMGET', JOBS, unpack(wanted))
  for i = 1, count do
    local blob = blobs[i]
    if not blob or sts[outcomes + i] then is_plain = false break end
    if not heading or find(blob, heading, 17, true) ~= 17 then
      name = name_of(blob)
      heading = sub(blob, 17, 19 + #name)
      if byte(heading) == NOT_PLAIN_BYTE or not find(names, NUL .. name .. NUL, 1, true) then is_plain = false break end
      name = 'n:' .. name
      if not started[name] then fields[#fields + 1], started[name] = name, 0 end
    end
    started[name] = started[name] + 1
  end
end
local meta = call('HMGET', META, unpack(fields))

-- A request that was answered before gets the same reply, and one that comes too late an error.
local remembered, is_late = meta[3], false
local number = ARGV[2]
if remembered and sub(remembered, 1, 8) ~= number then
  is_late = unpack_number('>I8', remembered) > unpack_number('>I8', number)
  remembered = nil
end
if remembered or is_late or not is_plain or meta[1] ~= '1' then
  for i = count, 1, -1 do call('LPUSH', W, entries[i]) end
  if remembered then return {0, cmsgpack.unpack(sub(remembered, 17))} end
  if is_late then return redis.error_reply('LATE a newer request of this sequence was processed first') end
  -- The caller goes on with its next request: this one must not be taken up later.
  if meta[2] then call('HSET', META, SEQUENCE, number .. pack('>I8', clock) .. encode({'full'})) end
  return {0, {'full'}}
end

-- Everything is checked: apply the changes.
local st_changes, n = {nil, nil, nil, nil}, 0 -- with room for one outcome and one claim
local changes, m = {nil, nil, nil, nil, nil, nil, nil, nil}, 0
if outcomes > 0 then
  local kinds = ARGV[11]
  --! insert completed_jobs
  m = 2
  changes[1], changes[2] = COMPLETED, format('%d', (meta[4] or 0) + outcomes)
end

local base, claimed, leases = 0, {}, nil
if count > 0 then
  base = math.max(tonumber(meta[2] or 0), now * 2048)
  changes[m + 1], changes[m + 2] = 'token', format('%d', base + count)
  m = m + 2
  for i = 5, #fields do
    local left = (meta[i] or 0) - started[fields[i]]
    if left == 0 then
      call('HDEL', META, fields[i])
    else
      changes[m + 1], changes[m + 2] = fields[i], format('%d', left)
      m = m + 2
    end
  end
  -- The encoding of {1, 0, 0, worker, now, 0, '', '', '', '', 0, 0}.
  local new = '\156\1\0\0' .. ARGV[7] .. '\207' .. pack('>I8', now) .. '\0\160\160\160\160\0\0'
  local expires = format('%d', now + ARGV[9])
  leases = {'0', '', nil, nil} -- the first two for leases.lua
  for i = 1, count do
    local id, at = wanted[i], 3 * i
    leases[2 * i + 1], leases[2 * i + 2] = expires, id
    st_changes[n + 1], st_changes[n + 2] = id, pack('>c1I8c0', ACTIVE, base + i, new) --@ claim: waiting -> active
    n = n + 2
    claimed[at - 2], claimed[at - 1], claimed[at] = id, blobs[i], ''
  end
end
--! insert leases

local flags, packed = string.rep('1', outcomes), ''
local reply = {'done', flags, base, -1, 0, claimed, now}
if n > 0 then
  call('HSET', ST, unpack(st_changes, 1, n)) --@ claim: waiting -> active
  --! insert packed_ids
  if ARGV[5] ~= '0' then
    call('XADD', LOG, 'MAXLEN', '~', ARGV[5], '*', 'i', packed, 's', string.rep(COMPLETED, outcomes) .. string.rep(ACTIVE, count))
  end
  if count == 0 then call('SET', VERSION, time[1] .. ':' .. time[2], 'PX', DAY) end
end
-- As in finish_and_claim_fast.lua, a repetition gets the ids of the claims from those of all changed jobs.
changes[m + 1] = SEQUENCE
changes[m + 2] = number .. pack('>I8', clock) .. '\151\165again' .. encode(flags, base, -1, 0)
  .. pack('>c1I4', '\219', #packed) .. packed .. pack('>c1I8', '\207', now)
call('HSET', META, unpack(changes, 1, m + 2))
return {0, reply}
