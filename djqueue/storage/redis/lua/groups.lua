-- Read groups of a queue: those with the most waiting jobs, and some by name.
--
-- ARGV: 1 the time, maximum number of groups of the first kind, how many are looked at; then names.
-- Returns {group mode or '', defaults of all groups or '', 1 if all groups with waiting jobs were looked at, groups of the
--   first kind, groups by name}; each group is name, numbers of waiting and active jobs, its overrides or ''.
--! include common group_names
--! keys meta group_waiting group_ready group_active groups

local limit, max_looks = tonumber(ARGV[2]), tonumber(ARGV[3])

local function look(group)
  local first, last = '[' .. group .. NUL, '(' .. group .. AFTER
  local waiting = call('ZLEXCOUNT', GROUP_WAITING, first, last) + call('ZLEXCOUNT', GROUP_READY, first, last)
  return {group, waiting, tonumber(call('HGET', GROUP_ACTIVE, group) or 0), call('HGET', GROUPS, group) or ''}
end

local found, seen = {}, {}
local function add(group)
  if not seen[group] then
    seen[group] = true
    found[#found + 1] = look(group)
  end
end

-- One group after another; if there are too many, then samples at even distances. The jobs of a group are next to each
-- other, so no group with a good share of all waiting jobs is missed.
local whole = limit == 0
local last = ''
while not whole and #found < max_looks do
  local name = next_group(last)
  if name then
    add(name)
    last = name
  else
    whole = true
  end
end
if not whole then
  local total = call('ZCARD', GROUP_WAITING)
  local looks = math.min(max_looks, total)
  for i = 0, looks - 1 do
    local rank = floor(i * total / looks)
    local entry = call('ZRANGE', GROUP_WAITING, rank, rank)[1]
    add(sub(entry, 1, string.find(entry, NUL, 1, true) - 1))
  end
end

table.sort(found, function(a, b)
  if a[2] ~= b[2] then return a[2] > b[2] end
  return a[1] < b[1]
end)
local busiest, named = {}, {}
for i = 1, math.min(limit, #found) do busiest[i] = found[i] end
for i = 4, #ARGV do named[#named + 1] = look(ARGV[i]) end
return {call('HGET', META, 'mode') or '', call('HGET', GROUPS, '') or '', whole and 1 or 0, busiest, named}
