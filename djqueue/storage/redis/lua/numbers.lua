-- Counters, numbers, and commands with many values.
--
-- The counters are fields of `meta` with one or two characters, or 'n:' and the name of waiting jobs: see ready.lua.
--! include request

-- Add to a counter; one that is zero is deleted.
local function add(field, number)
  if number ~= 0 and call('HINCRBY', META, field, number) == 0 then
    call('HDEL', META, field)
  end
end

-- Reserve ascending numbers and return the first: 2,048 a millisecond. They go on ascending when a queue was removed
-- and is new. Numbers that workers and other queues know also do when the server that gave the last one is lost.
local function next_numbers(field, count)
  local last, least = call('HINCRBY', META, field, count), now * 2048 + count
  if last == count or last < least and (field == 'token' or field == 'sent') then
    last = least
    call('HSET', META, field, string.format('%d', last))
  end
  return last - count + 1
end

-- Call a command with any number of values.
local function variadic(command, key, values)
  for first = 1, #values, CHUNK do
    call(command, key, unpack(values, first, math.min(first + CHUNK - 1, #values)))
  end
end
