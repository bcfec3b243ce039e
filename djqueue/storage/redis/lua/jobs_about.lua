-- Read jobs about a subject, newest first.
--
-- ARGV: 1 the time, the subject, the position to go on after (enqueued at and number, or only the first; '' for the
--   newest), maximum number of jobs.
-- Returns {time, jobs}; each job is id, record without the payload, state entry.
--! include reading
--! keys about jobs st

local subject, mark, limit = ARGV[2], ARGV[3], tonumber(ARGV[4])
local first = #subject + 18

local found, high = {}, '(' .. subject .. (mark == '' and AFTER or NUL .. mark)
while #found < 3 * limit do
  local entries = call('ZREVRANGEBYLEX', ABOUT, high, '[' .. subject .. NUL, 'LIMIT', 0, limit)
  for _, entry in ipairs(entries) do
    local id = sub(entry, first)
    local blob, st = call('HGET', JOBS, id), call('HGET', ST, id)
    local is_this = blob and sub(blob, 1, 8) == sub(entry, first - 8, first - 1) -- not another job with its id
    if is_this and not has_expired(st) and #found < 3 * limit then
      local n = #found
      found[n + 1], found[n + 2] = id, without_payload(blob)
      found[n + 3] = st or ''
    end
    high = '(' .. entry
  end
  if #entries < limit then break end
end
return {string.format('%.0f', now), found}
