-- Read jobs for a snapshot, each with all that belongs to it, as they are at one moment.
--
-- KEYS: of each job, its result, its log lines, its items, and its forwarding note.
-- ARGV: 1 the time, the size in bytes at which a reply ends; then the ids.
-- Returns {time, jobs}; each job is its record, state entry, result, progress, ended attempts, log lines, items, dead
--   letter and its number; or, if it is not here, the queue that it was moved to, if any. The last ids may be left out.
--! include layout
--! keys jobs st hist prog dead dead_letters

local most_bytes, size, replies = tonumber(ARGV[2]), 0, {}

local function counted(value)
  if type(value) == 'string' then size = size + #value end
  if type(value) == 'table' then
    for i = 1, #value do size = size + #value[i] end
  end
  return value
end

for i = 3, #ARGV do
  if size >= most_bytes then break end
  local id, key = ARGV[i], FIXED + 4 * (i - 3)
  local blob = call('HGET', JOBS, id)
  if blob then
    replies[i - 2] = {
      counted(blob), counted(call('HGET', ST, id)), counted(call('GET', KEYS[key + 1])), counted(call('HGET', PROG, id)),
      counted(call('HGET', HIST, id)), counted(call('LRANGE', KEYS[key + 2], 0, -1)),
      counted(call('LRANGE', KEYS[key + 3], 0, -1)), counted(call('HGET', DEAD_LETTERS, id)), call('ZSCORE', DEAD, id),
    }
  else
    replies[i - 2] = call('GET', KEYS[key + 4])
  end
end
return {string.format('%.0f', now), replies}
