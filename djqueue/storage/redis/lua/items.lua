-- Read items of jobs.
--
-- KEYS: of each job, its items.
-- ARGV: 1 the time, the size in bytes at which a reply ends, maximum number of items of a job; then of each job its id,
--   the token of the attempt that was read, and the number of its items that were read.
-- Returns {time, jobs}; each job is its record without the payload, its state entry, index of the first item, items.
--! include reading
--! keys jobs st

local PAGE = 20
local most_bytes, limit = tonumber(ARGV[2]), tonumber(ARGV[3])

local function count_of(st)
  return cmsgpack.unpack(sub(st, ENDED[sub(st, 1, 1)] and 26 or 10))[13] or 0
end

local function behind(key, first)
  local found, size = {}, 0
  while size < most_bytes and #found < limit do
    local some = call('LRANGE', key, first + #found, first + #found + PAGE - 1)
    for _, item in ipairs(some) do
      if size >= most_bytes or #found == limit then break end
      found[#found + 1] = item
      size = size + #item
    end
    if #some < PAGE then break end
  end
  return found
end

local replies = {}
for i = 4, #ARGV, 3 do
  local id, key = ARGV[i], KEYS[FIXED + (i - 1) / 3]
  local blob, st = call('HGET', JOBS, id), call('HGET', ST, id)
  local first, found = 0, {}
  if st and count_of(st) > 0 then
    if sub(st, 2, 9) == ARGV[i + 1] then first = tonumber(ARGV[i + 2]) end
    found = behind(key, first)
  end
  replies[#replies + 1] = blob and {without_payload(blob), st, first, found}
end
return {string.format('%.0f', now), replies}
