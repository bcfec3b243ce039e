-- Read jobs for a snapshot, each with all that belongs to it, as they are at one moment.
--
-- KEYS: of each job, its result, its log lines, its items, and its forwarding note.
-- ARGV: 1 the time; then the ids.
-- Returns {time, jobs}; each job is its record, state entry, result, progress, ended attempts, log lines, items, dead
--   letter and its number; or, if it is not here, the queue that it was moved to, if any.
--! include layout
--! keys jobs st hist prog dead dead_letters

local replies = {}
for i = 2, #ARGV do
  local id, key = ARGV[i], FIXED + 4 * (i - 2)
  local blob = call('HGET', JOBS, id)
  if blob then
    replies[i - 1] = {
      blob, call('HGET', ST, id), call('GET', KEYS[key + 1]), call('HGET', PROG, id), call('HGET', HIST, id),
      call('LRANGE', KEYS[key + 2], 0, -1), call('LRANGE', KEYS[key + 3], 0, -1),
      call('HGET', DEAD_LETTERS, id), call('ZSCORE', DEAD, id),
    }
  else
    replies[i - 1] = call('GET', KEYS[key + 4])
  end
end
return {string.format('%.0f', now), replies}
