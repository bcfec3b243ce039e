-- What every script begins with: the time, the caller's lane, and what is told at the end.
--
-- ARGV: 1 the time, '' for Redis's own, 2 the number of this request in its lane, 3 the queue's prefix, 4 PUBLISH or
-- SPUBLISH, 5 the length of the stream of changes (0: none is kept).
--! keys lane meta count jobs st watch log outbox version

local call, sub, byte, floor = redis.call, string.sub, string.byte, math.floor
local pack, unpack_number = struct.pack, struct.unpack
local encode, decode = cmsgpack.pack, cmsgpack.unpack
local ARGS = 6 -- of the script itself, from here on

-- A request that is sent again, because its answer was lost, changes nothing and is answered alike. So does
-- the first sending of one, if it arrives when the next has been answered already.
local LANE_TTL = 60000
do
  local seen = call('GET', LANE)
  if seen and sub(seen, 1, 8) == ARGV[2] then
    local remembered = decode(sub(seen, 9))
    remembered[1] = call('LLEN', OUTBOX)
    return remembered
  elseif seen and unpack_number('>I8', seen) > unpack_number('>I8', ARGV[2]) then
    return redis.error_reply('LATE another request of its lane came after this one')
  end
end

local time = call('TIME')
local clock = time[1] * 1000 + floor(time[2] / 1000)
local now = tonumber(ARGV[1]) or clock
local watching = call('EXISTS', WATCH) == 1
local everything = watching and tonumber(call('HGET', WATCH, '*') or 0) > clock
local events, changed, turns, woken, incidents = {}, {}, {}, false, {}

-- Scripts that may find nothing to do say so in `unchanged`: a page shows the same as before. Others count as a change.
local VERSION_TTL, unchanged, moved = 86400000, false, false

-- Events of jobs that somebody asked for; ids of changed jobs, for the mirror, and what they have become: the letter of
-- a state, 'u' in the state in which they were, 'r' removed; what the answer tells beside.
local function tell(id, name, event, state, count)
  if watching and (everything or tonumber(call('HGET', WATCH, '=' .. id) or 0) > clock) then
    events[#events + 1] = {id, name, event, state, now, count}
  end
end

local function note(id, letter)
  local n = #changed + 1
  changed[n], turns[n] = id, letter
end

local function answer(reply, remembered)
  if #events > 0 then
    call(ARGV[4], ARGV[3] .. ':events', encode(events))
  end
  if woken then
    call(ARGV[4], ARGV[3] .. ':wake', '')
  end
  if ARGV[5] ~= '0' and #changed > 0 then
    call('XADD', LOG, 'MAXLEN', '~', ARGV[5], '*', 'i', encode(changed), 's', table.concat(turns))
  end
  if not unchanged then
    call('SET', VERSION, time[1] .. ':' .. time[2], 'PX', VERSION_TTL)
  end
  local told = #incidents > 0 and incidents or nil
  call('SET', LANE, ARGV[2] .. encode({0, remembered or reply, told}), 'PX', LANE_TTL)
  return {call('LLEN', OUTBOX), reply, told}
end

-- A counter that has come to nothing is not kept.
local function add(field, number)
  if number ~= 0 and call('HINCRBY', COUNT, field, number) == 0 then
    call('HDEL', COUNT, field)
  end
end

-- Numbers that ascend also over the end of a queue and its beginning anew: 2,048 a millisecond. Those that
-- are known elsewhere, to workers and other queues, ascend also if the server that gave the last is lost.
local KNOWN_ELSEWHERE = {token = true, sent = true}
local function numbers(field, many)
  local last, least = call('HINCRBY', META, field, many), now * 2048 + many
  if last == many or last < least and KNOWN_ELSEWHERE[field] then
    last = least
    call('HSET', META, field, string.format('%.0f', last))
  end
  return last - many + 1
end

local function variadic(command, key, values)
  for first = 1, #values, 4000 do
    call(command, key, unpack(values, first, math.min(first + 3999, #values)))
  end
end
