-- Read what connects jobs with others.
--
-- ARGV: 1 the time, maximum number of dependents of each job; then the ids.
-- Returns {time, jobs}; each job is its record without the payload, its state entry, and queue and id of each job that
--   waits for it or may read its record.
--! include reading
--! keys jobs st deps holds

local limit = tonumber(ARGV[2])

-- skipped: bytes of an entry between the id and the dependent.
local function collect(found, key, id, skipped)
  for _, entry in ipairs(call('ZRANGEBYLEX', key, '[' .. id .. NUL, '(' .. id .. AFTER, 'LIMIT', 0, limit)) do
    local who = sub(entry, #id + 2 + skipped)
    if who ~= '' then
      who = cmsgpack.unpack(who)
      found[#found + 1], found[#found + 2] = who[1], who[2]
    end
  end
end

local replies = {}
for i = 3, #ARGV do
  local id = ARGV[i]
  local blob, found = call('HGET', JOBS, id), {}
  if blob then
    collect(found, DEPS, id, 8)
    collect(found, HOLDS, id, 0)
  end
  replies[i - 2] = blob and {without_payload(blob), call('HGET', ST, id), found}
end
return {string.format('%.0f', now), replies}
