-- Enqueue up to a thousand jobs that are new, plain and due now; enqueue.lua takes all others.
--
-- ARGV: '1' if the caller has listed the queue; the jobs' name; their subject ('' for none); then of each job its id and
--   its record from the flag on.
-- Returns 0, or 'unlisted' if the queue is new.
--! include request numbers
--! keys w about

local name, subject, first = ARGV[ARGS + 1], ARGV[ARGS + 2], ARGS + 3
local count = (#ARGV - ARGS - 2) / 2
if ARGV[ARGS] == '0' and call('EXISTS', META) == 0 then return {0, 'unlisted'} end
local created = pack('>I8', now)
local number = next_numbers('rear', count)
local ids, fields, entries = {}, {}, {}
for i = 1, count do
  local at = 2 * i
  local id, mark = ARGV[first + at - 2], pack('>I8', number + i - 1)
  ids[i], fields[at - 1], fields[at] = id, id, mark .. created .. ARGV[first + at - 1]
  entries[i] = mark .. id
end
variadic('HSET', JOBS, fields)
variadic('RPUSH', W, entries)
if subject ~= '' then
  local subject_entries = {}
  for i = 1, count do
    subject_entries[2 * i - 1], subject_entries[2 * i] = 0, subject .. NUL .. created .. entries[i] -- see completion.lua
  end
  variadic('ZADD', ABOUT, subject_entries)
end
add('n:' .. name, count)
if watching then
  --! insert watched
  for i = 1, count do emit_event(ids[i], name, 'enqueued', 'waiting') end
end
woken = true

-- Pages compare the number of the last job like the version.
unchanged = true
local reply, states, reported, packed = 0, string.rep(WAITING, count), nil, nil
local memory = ARGV[2] .. encode({0, reply})
--! insert packed_ids
--! insert answer
