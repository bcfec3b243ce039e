-- Add up to a thousand jobs that are new, plain and due now. See `enqueue` for all others.
--
-- Arguments: whether the caller has seen to it that the queue is listed ('1'), the jobs' name, their subject ('' none); then for each its id and the rest of its record, behind the time.
--! include base
--! keys w about

local name, subject, first = ARGV[ARGS + 1], ARGV[ARGS + 2], ARGS + 3
local many = (#ARGV - ARGS - 2) / 2
if ARGV[ARGS] == '0' and call('EXISTS', META) == 0 then return {0, 'unlisted'} end
local created = pack('>I8', now)
local number = numbers('rear', many)
local fields, entries = {}, {}
for i = 0, many - 1 do
  local id, mark = ARGV[first + 2 * i], pack('>I8', number + i)
  fields[2 * i + 1], fields[2 * i + 2] = id, mark .. created .. ARGV[first + 2 * i + 1]
  entries[i + 1] = mark .. id
  changed[i + 1], turns[i + 1] = id, 'w'
  if watching then tell(id, name, 'queued', 'waiting') end
end
variadic('HSET', JOBS, fields)
variadic('RPUSH', W, entries)
if subject ~= '' then
  local places = {}
  for i = 1, many do
    places[2 * i - 1], places[2 * i] = 0, subject .. '\0' .. created .. entries[i] -- see `ends`
  end
  variadic('ZADD', ABOUT, places)
end
add('n:' .. name, many)
woken = true
return answer(0)
