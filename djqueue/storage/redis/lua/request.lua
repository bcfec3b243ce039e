-- The beginning of every script that changes a queue.
--
-- KEYS: 1 the caller's request sequence.
-- ARGV: 1 the time, '' for the server's clock; 2 the number of this request in its sequence; 3 the queue's prefix;
--   4 PUBLISH or SPUBLISH; 5 the maximum length of the stream of changes (0: none is written).
-- Returns, by `answer.lua`: {length of the outbox, the script's reply, incidents or nothing}.
--! keys sequence meta jobs st watch log outbox version restoring
--! rare watch outbox restoring
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

-- How many of the keys that the script calls rare exist, without those that were found: most queues have none.
local rare = call('EXISTS', RARE)
if rare > 0 and call('EXISTS', RESTORING) == 1 then
  return redis.error_reply('RESTORING a snapshot is being written to the storage')
end
local watching = rare > 0 and call('EXISTS', WATCH) == 1
if watching then rare = rare - 1 end
local has_outbox = rare > 0
local events, woken = {}, false

-- A script that may find nothing to do sets `unchanged`: pages then still show the current state.
local unchanged = false
