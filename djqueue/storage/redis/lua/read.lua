-- Read jobs with all their parts, as they are at one moment.
--
-- KEYS: of each job, its result and its log lines.
-- ARGV: 1 the time; then the ids.
-- Returns {time, jobs}; each job is record, state entry, result, progress, ended attempts, log lines.
--! include common
--! keys jobs st hist prog

local replies = {}
for i = 2, #ARGV do
  local id, key = ARGV[i], FIXED + 2 * (i - 2)
  local blob = call('HGET', JOBS, id)
  replies[i - 1] = blob and {
    blob, call('HGET', ST, id), call('GET', KEYS[key + 1]), call('HGET', PROG, id),
    call('HGET', HIST, id), call('LRANGE', KEYS[key + 2], 0, -1),
  }
end
return {string.format('%.0f', now), replies}
