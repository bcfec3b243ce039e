-- Enqueue up to a thousand jobs that are new, plain and due now; enqueue.lua takes all others.
--
-- ARGV: '1' if the caller has listed the queue; the jobs' name; their subject ('' for none); then of each job its id and
--   its record from the flag on.
-- Returns 0, or 'unlisted' if the queue is new.
--! include base
--! keys w about

local name, subject, first = ARGV[ARGS + 1], ARGV[ARGS + 2], ARGS + 3
local count = (#ARGV - ARGS - 2) / 2
if ARGV[ARGS] == '0' and call('EXISTS', META) == 0 then return {0, 'unlisted'} end
local created = pack('>I8', now)
local number = next_numbers('rear', count)
local fields, entries = {}, {}
for i = 0, count - 1 do
  local id, mark = ARGV[first + 2 * i], pack('>I8', number + i)
  fields[2 * i + 1], fields[2 * i + 2] = id, mark .. created .. ARGV[first + 2 * i + 1]
  entries[i + 1] = mark .. id
  changed[i + 1], codes[i + 1] = id, 'w'
  if watching then emit_event(id, name, 'queued', 'waiting') end
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
woken = true
return answer(0)
