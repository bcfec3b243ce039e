-- The beginning of every script that changes a queue, and the end of its reply.
--
-- KEYS: 1 the caller's request sequence.
-- ARGV: 1 the time, '' for the server's clock; 2 the number of this request in its sequence; 3 the queue's prefix;
--   4 PUBLISH or SPUBLISH; 5 the maximum length of the stream of changes (0: none is written).
-- Returns, through `answer`: {length of the outbox, the script's reply, incidents or nothing}.
--! keys sequence meta count jobs st watch log outbox version
--! include common

local pack = struct.pack
local encode, decode = cmsgpack.pack, cmsgpack.unpack
local ARGS = 6 -- where the script's own arguments begin

-- A request that is repeated because its reply was lost changes nothing and gets the same reply. A request that
-- arrives after the next one of its sequence was answered changes nothing, either.
do
  local last = call('GET', SEQUENCE)
  if last and sub(last, 1, 8) == ARGV[2] then
    local remembered = decode(sub(last, 9))
    remembered[1] = call('LLEN', OUTBOX)
    return remembered
  elseif last and unpack_number('>I8', last) > unpack_number('>I8', ARGV[2]) then
    return redis.error_reply('LATE a newer request of this sequence was processed first')
  end
end

local has_outbox = call('EXISTS', WATCH, OUTBOX) > 0 -- or watchers: most queues have neither
local watching = has_outbox and call('EXISTS', WATCH) == 1
local watches_all = watching and tonumber(call('HGET', WATCH, '*') or 0) > clock
local events, changed, codes, woken, incidents = {}, {}, {}, false, {}

-- A script that may find nothing to do sets `unchanged`: pages then still show the current state.
local unchanged, has_moved = false, false

local function is_watched(id)
  return watching and (watches_all or tonumber(call('HGET', WATCH, '=' .. id) or 0) > clock)
end

-- Publish an event of a job, if it is subscribed to.
local function emit_event(id, name, event, state, count)
  if is_watched(id) then events[#events + 1] = {id, name, event, state, now, count} end
end

-- Write a changed job to the stream of changes. code: that of its new state, 'u' if the state is the same, 'r' if the
-- job was removed.
local function note(id, code)
  local n = #changed + 1
  changed[n], codes[n] = id, code
end

-- Return the ids of changed jobs for the stream (MessagePack). Those of a large batch are usually UUIDs of one source:
-- their common beginning and end, the length of what is between, and the parts between, joined.
local function pack_ids(ids)
  local one, other = ids[1], ids[#ids]
  if #ids >= 250 and #one == #other and one ~= other then
    local from, to = 1, #one
    while string.byte(one, from) == string.byte(other, from) do from = from + 1 end
    while string.byte(one, to) == string.byte(other, to) do to = to - 1 end
    local heading, tail, parts = sub(one, 1, from - 1), sub(one, to + 1), {}
    local is_even = true
    for i = 1, #ids do
      parts[i], is_even = sub(ids[i], from, to), is_even and #ids[i] == #one
    end
    -- Comparing them as a whole takes less time than one by one.
    if is_even and heading .. table.concat(parts, tail .. heading) .. tail == table.concat(ids) then
      return encode({heading, tail, to - from + 1, table.concat(parts)})
    end
  end
  return encode(ids)
end

-- remembered: the reply to a repetition of this request, if it is another one.
local function answer(reply, remembered)
  if #events > 0 then
    call(ARGV[4], ARGV[3] .. ':events', encode(events))
  end
  if woken then
    call(ARGV[4], ARGV[3] .. ':wake', '')
  end
  if ARGV[5] ~= '0' and #changed > 0 then
    call('XADD', LOG, 'MAXLEN', '~', ARGV[5], '*', 'i', pack_ids(changed), 's', table.concat(codes))
  end
  if not unchanged then
    -- A new expiry would take longer than the rest; without the key, pages read again.
    local version = time[1] .. ':' .. time[2]
    if not call('SET', VERSION, version, 'XX', 'KEEPTTL') then call('SET', VERSION, version, 'PX', DAY) end
  end
  local reported = #incidents > 0 and incidents or nil
  call('SET', SEQUENCE, ARGV[2] .. encode({0, remembered or reply, reported}), 'PX', MINUTE_TEXT)
  return {has_outbox and call('LLEN', OUTBOX) or 0, reply, reported}
end

-- Add to a counter; one that is zero is deleted.
local function add(field, number)
  if number ~= 0 and call('HINCRBY', COUNT, field, number) == 0 then
    call('HDEL', COUNT, field)
  end
end

-- Reserve ascending numbers and return the first: 2,048 a millisecond. They go on ascending when a queue was removed
-- and is new. Numbers that workers and other queues know also do when the server that gave the last one is lost.
local function next_numbers(field, count)
  local last, least = call('HINCRBY', META, field, count), now * 2048 + count
  if last == count or last < least and (field == 'token' or field == 'sent') then
    last = least
    call('HSET', META, field, string.format('%.0f', last))
  end
  return last - count + 1
end

-- Call a command with any number of values.
local function variadic(command, key, values)
  for first = 1, #values, CHUNK do
    call(command, key, unpack(values, first, math.min(first + CHUNK - 1, #values)))
  end
end
