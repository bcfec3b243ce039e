-- Enqueue a staged chunk of jobs with the script that enqueues any jobs, which is `run`, in one step.
--
-- KEYS: those of `run`; the publication; the part's chunks by number; the results of chunks by name.
-- ARGV: those of every script; '1' if the caller has listed the queue; for enqueue.lua the configuration of groups, the
--   maximum number of pending jobs, what is dropped above that, the dead letters' ttl; then the write, the chunk's name and its number.
--   A chunk is a list (MessagePack): the jobs' name, then of each its id, start, and record from the flag on.
-- Returns 'unlisted', 'full', 'missing', or the numbers of jobs that were queued, that were duplicates, that had completed
--   before, and that are dead letters.

local name, number = ARGV[#ARGV - 1], ARGV[#ARGV]
local stored = redis.call('HGET', KEYS[#KEYS], name)
if stored then return {0, cmsgpack.unpack(stored)} end -- the reply was lost
local publication = redis.call('HMGET', KEYS[#KEYS - 2], 'state', 'write')
if publication[1] ~= 'open' or publication[2] ~= ARGV[#ARGV - 2] then return {0, 'missing'} end -- it was dropped, or has ended
local blob = redis.call('HGET', KEYS[#KEYS - 1], number)
if not blob then return {0, 'missing'} end
local jobs = cmsgpack.unpack(blob)
local arguments = {unpack(ARGV, 1, 6)}
arguments[7] = jobs[1]
local keys = {unpack(KEYS, 1, #KEYS - 3)}
if #ARGV > 9 then
  arguments[8], arguments[9], arguments[10], arguments[11], arguments[12] = '*', ARGV[7], ARGV[8], ARGV[9], ARGV[10]
  local limit, size = tonumber(ARGV[8]), (#jobs - 1) / 3
  -- A chunk larger than the queue would never fit, so it is let in as long as the queue is not full.
  if limit and ARGV[9] == '' and size > limit then arguments[10] = limit + size - 1 end
  local prefix = string.sub(KEYS[2], 1, -5) -- of the queue: all its keys are in one slot
  for i = 2, #jobs do arguments[i + 11] = jobs[i] end
  for i = 2, #jobs, 3 do
    local at = #keys
    keys[at + 1], keys[at + 2], keys[at + 3] = prefix .. 'r:' .. jobs[i], prefix .. 'l:' .. jobs[i], prefix .. 'i:' .. jobs[i]
  end
else
  arguments[8] = '' -- no subject
  for i = 2, #jobs, 3 do
    local at = #arguments
    arguments[at + 1], arguments[at + 2] = jobs[i], jobs[i + 2]
  end
end
local answer = run(keys, arguments)
local replies = answer[2]
if type(replies) == 'string' then return answer end
local counts = {0, 0, 0, 0}
if replies == 0 then
  counts[1] = (#jobs - 1) / 3
else
  local positions = {queued = 1, duplicate = 2, completed = 3, rejected = 4}
  for _, reply in ipairs(replies) do counts[positions[reply[1]]] = counts[positions[reply[1]]] + 1 end
end
redis.call('HSET', KEYS[#KEYS], name, cmsgpack.pack(counts))
-- Totals, so that the end of a publication does not read the results of all chunks: see manifest.lua.
if redis.call('HINCRBY', KEYS[#KEYS], '=0', 1) == 1 then
  local lifetime = redis.call('PTTL', KEYS[#KEYS - 2])
  if lifetime > 0 then redis.call('PEXPIRE', KEYS[#KEYS], lifetime) end
end
for at, count in ipairs(counts) do
  if count > 0 then redis.call('HINCRBY', KEYS[#KEYS], '=' .. at, count) end
end
redis.call('HDEL', KEYS[#KEYS - 1], number)
answer[2] = counts
return answer
