-- Groups of the queue: those with most waiting jobs, and some by name.
--
-- Arguments: how many of the first kind, how many are looked at, and names.
-- Answers what is recorded of the mode and said to all groups ('' each for nothing); whether all groups with waiting jobs
-- were looked at; and for both kinds, of each group: its name, how many of its jobs wait and are active, and what was said
-- to it.
--! keys meta parks heads out groups

local call, sub, find = redis.call, string.sub, string.find
local limit, most = tonumber(ARGV[2]), tonumber(ARGV[3])
local NUL, AFTER = string.char(0), string.char(1)

local function look(group)
  local first, last = '[' .. group .. NUL, '(' .. group .. AFTER
  local waiting = call('ZLEXCOUNT', PARKS, first, last) + call('ZLEXCOUNT', HEADS, first, last)
  return {group, waiting, tonumber(call('HGET', OUT, group) or 0), call('HGET', GROUPS, group) or ''}
end

local found, seen = {}, {}
local function note(entry)
  local group = sub(entry, 1, find(entry, NUL, 1, true) - 1)
  if not seen[group] then
    seen[group] = true
    found[#found + 1] = look(group)
  end
end

-- One group after another; then, if there are more of them, those that lie at even distances: a group's jobs lie side by
-- side, so none that has a good part of all that wait is missed.
local whole = limit == 0
local last = ''
while not whole and #found < most do
  local nearest
  for _, key in ipairs({PARKS, HEADS}) do
    local entry = call('ZRANGEBYLEX', key, last == '' and '-' or '(' .. last .. AFTER, '+', 'LIMIT', 0, 1)[1]
    if entry and (not nearest or entry < nearest) then nearest = entry end
  end
  if nearest then
    note(nearest)
    last = found[#found][1]
  else
    whole = true
  end
end
if not whole then
  local many = call('ZCARD', PARKS)
  local looks = math.min(most, many)
  for i = 0, looks - 1 do
    local rank = math.floor(i * many / looks)
    note(call('ZRANGE', PARKS, rank, rank)[1])
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
