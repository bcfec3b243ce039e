-- Finish jobs and claim the next ones in a queue that is known to be plain: `meta` has `plain`.
--
-- finish_and_claim_fast.lua sets that field when it finds no jobs but those of the list, no limits, no subscribers and no
-- messages; every script that may add some removes it. So this one needs no other keys and few commands. If the queue or
-- one of the jobs is not plain, it changes nothing and replies 'f': the caller then runs the other script. Tables,
-- functions and lists in the reply take long for a call that concerns one job, so there are few of them.
--
-- KEYS: of each job that was completed with a result, the result.
-- ARGV: 1 the time, 2 the number of this request in its sequence, 3 the maximum length of the stream of changes; slots,
--   lease, the beginning of the body of a claimed job (MessagePack of attempts, failures, stalls and worker), the worker's
--   job names (each as in a record, with its length), the outcomes (see completed_jobs.lua), their ids, of which none
--   occurs twice; then the results.
-- Returns a string: 'd', last token (8 bytes), time (8) and, of each claim, the lengths of its id and its record (4 each),
--   id and record. To a repeated request 'a', token, time, and the ids of all changed jobs as in the stream of changes.
--   It is remembered in `meta`, in a field with the name of the caller's sequence; see sweep.lua.
--! keys sequence meta jobs st log w lease finished
--! include common

local pack, encode, format, byte, find = struct.pack, cmsgpack.pack, string.format, string.byte, string.find
local number, stream, slots, names, ends = ARGV[2], ARGV[3], ARGV[4], ARGV[7], ARGV[8]
local first, outcomes = 8, #ends / 10
local last = first + outcomes -- the last id

-- Tables are created with room for one outcome and one claim.
local ids, entries = {nil, nil}, slots ~= '0' and call('LPOP', W, slots) or {}
local count = #entries
for i = 1, outcomes do ids[i] = ARGV[first + i] end
for i = 1, count do ids[outcomes + i] = sub(entries[i], 9) end

-- Check the outcomes and the next jobs.
local is_plain, sts, blobs = true, nil, nil
if outcomes + count > 0 then sts = call('HMGET', ST, unpack(ids, 1, outcomes + count)) end
for i = 1, outcomes do
  if not sts[i] or find(sts[i], sub(ends, 10 * i - 8, 10 * i), 1, true) ~= 1 then is_plain = false end
end
-- What is read of `meta`: these fields, then the number of waiting jobs of each name that is claimed.
local fields, started = {'plain', 'token', SEQUENCE, COMPLETED, nil}, {nil, nil, nil, nil, nil}
if count > 0 then
  blobs = call('HMGET', JOBS, unpack(ids, outcomes + 1, outcomes + count))
  local name, at = nil, 4
  for i = 1, count do
    local blob = blobs[i]
    if not blob or sts[outcomes + i] or byte(blob, 17) == NOT_PLAIN_BYTE then is_plain = false break end
    if not name or find(blob, name, 18, true) ~= 18 then
      name = sub(blob, 18, 19 + unpack_number('>I2', blob, 18))
      if not find(names, name, 1, true) then is_plain = false break end
      local field = 'n:' .. sub(name, 3)
      at = 5
      while fields[at] and fields[at] ~= field do at = at + 1 end
      fields[at] = field
    end
    started[at] = (started[at] or 0) + 1
  end
end
local meta = call('HMGET', META, unpack(fields))

-- A request that was answered before gets the same reply, and one that comes too late an error.
local remembered, is_late = meta[3], false
if remembered and sub(remembered, 1, 8) ~= number then
  is_late = unpack_number('>I8', remembered) > unpack_number('>I8', number)
  remembered = nil
end
if remembered or is_late or not is_plain or meta[1] ~= '1' then
  for i = count, 1, -1 do call('LPUSH', W, entries[i]) end
  if remembered then return sub(remembered, 17) end
  if is_late then return redis.error_reply('LATE a newer request of this sequence was processed first') end
  -- The caller goes on with its next request: this one must not be taken up later.
  if meta[2] then call('HSET', META, SEQUENCE, number .. pack('>I8', clock) .. 'f') end
  return 'f'
end

-- Everything is checked: apply the changes.
local st_changes, n = {nil, nil, nil, nil, nil, nil, nil, nil}, 0
if outcomes > 0 then
  --! insert completed_jobs
end
local base, claims, leases = math.max(meta[2] or 0, now * 2048), '', nil
if count > 0 then
  -- With the rest of the encoding of {1, 0, 0, worker, now, 0, '', '', '', '', 0, 0}.
  local new = ARGV[6] .. pack('>BI8c7', 207, now, '\0\160\160\160\160\0\0')
  local expires, found = format('%d', now + ARGV[5]), {nil, nil, nil}
  leases = {'0', '', nil, nil} -- the first two for leases.lua
  for i = 1, count do
    local id, blob = ids[outcomes + i], blobs[i]
    leases[2 * i + 1], leases[2 * i + 2] = expires, id
    st_changes[n + 1], st_changes[n + 2] = id, ACTIVE .. pack('>I8', base + i) .. new --@ claim: waiting -> active
    n = n + 2
    found[3 * i - 2], found[3 * i - 1], found[3 * i] = pack('>I4I4', #id, #blob), id, blob
  end
  claims = table.concat(found)
end
--! insert leases

local packed = ''
if n > 0 then
  call('HSET', ST, unpack(st_changes, 1, n)) --@ claim: waiting -> active
  --! insert packed_ids
  if stream ~= '0' then
    call('XADD', LOG, 'MAXLEN', '~', stream, '*', 'i', packed, 's', string.rep(COMPLETED, outcomes) .. string.rep(ACTIVE, count))
  end
end
-- Pages compare the number of the last token, which therefore also changes if jobs only end. A repetition gets the ids of
-- the claims from those of all changed jobs.
local heading = pack('>I8I8', base, now)
local changes, m = st_changes, 2
changes[1], changes[2] = SEQUENCE, number .. pack('>I8', clock) .. 'a' .. heading .. packed
if n > 0 then
  changes[3], changes[4] = 'token', format('%d', base + math.max(count, 1))
  m = 4
end
if outcomes > 0 then
  changes[5], changes[6] = COMPLETED, format('%d', (meta[4] or 0) + outcomes)
  m = 6
end
for i = 5, #fields do
  local left = (meta[i] or 0) - started[i]
  if left == 0 then
    call('HDEL', META, fields[i])
  else
    changes[m + 1], changes[m + 2] = fields[i], format('%d', left)
    m = m + 2
  end
end
call('HSET', META, unpack(changes, 1, m))
return 'd' .. heading .. claims
