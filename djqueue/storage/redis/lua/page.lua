-- Read a page of one structure.
--
-- ARGV: 1 the time, the structure (w z unhandled group_waiting due lease dead finished unmet), maximum number of jobs,
--   '1' to read from its end, the mark to go on after ('' for none) and its score; for 'finished' the state code wanted.
-- Returns for each entry the job's id, mark and score; the id is '' if the entry is of no job of that state.
--! include common list_position
--! keys st w z unhandled group_waiting due lease dead finished unmet

local find = string.find
local kind, limit, down, mark, score = ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1', ARGV[5], ARGV[6]
local keys = {due = DUE, lease = LEASE, dead = DEAD, finished = FINISHED, z = Z, unhandled = UNHANDLED, group_waiting = GROUP_WAITING}
local key, found = keys[kind], {}

local function collect(id, its_mark, its_score)
  local n = #found
  found[n + 1], found[n + 2], found[n + 3] = id, its_mark, its_score or ''
end

local function by_score()
  local first
  if mark == '' then
    first = down and call('ZCARD', key) - 1 or 0
  elseif call('ZSCORE', key, mark) == score then
    first = call('ZRANK', key, mark) + (down and -1 or 1)
  else
    first = call('ZCOUNT', key, '-inf', '(' .. score) - (down and 1 or 0)
  end
  local low, high = down and math.max(0, first - limit + 1) or first, down and first or first + limit - 1
  if high < 0 then return end
  local entries = call('ZRANGE', key, low, high, 'WITHSCORES')
  for i = 1, #entries, 2 do
    local at = down and #entries - i or i
    local id = entries[at]
    -- Groups that pause until their rate allows more are in `due`, too.
    local is_wanted = sub(id, 1, 1) ~= NUL
    if kind == 'finished' then is_wanted = sub(call('HGET', ST, id) or '', 1, 1) == ARGV[7] end
    collect(is_wanted and id or '', id, entries[at + 1])
  end
end

local function by_member()
  local entries
  if down then
    entries = call('ZREVRANGEBYLEX', key, mark == '' and '+' or '(' .. mark, '-', 'LIMIT', 0, limit)
  else
    entries = call('ZRANGEBYLEX', key, mark == '' and '-' or '(' .. mark, '+', 'LIMIT', 0, limit)
  end
  for _, entry in ipairs(entries) do
    local at = kind == 'z' and 0 or find(entry, '%z', kind == 'unhandled' and 2 or 1)
    collect(sub(entry, at + (kind == 'group_waiting' and 9 or 13)), entry)
  end
end

-- A blocked job has an entry for each of its dependencies.
local function by_job()
  for _ = 1, limit do
    local entry
    if down then
      entry = call('ZREVRANGEBYLEX', UNMET, mark == '' and '+' or '(' .. mark .. NUL, '-', 'LIMIT', 0, 1)[1]
    else
      entry = call('ZRANGEBYLEX', UNMET, mark == '' and '-' or '[' .. mark .. AFTER, '+', 'LIMIT', 0, 1)[1]
    end
    if not entry then return end
    mark = sub(entry, 1, find(entry, '%z') - 1)
    collect(mark, mark)
  end
end

local function by_index()
  local step = down and -1 or 1
  local at = down and call('LLEN', W) - 1 or 0
  if mark ~= '' then at = index_from(mark, math.huge) - (down and 1 or 0) end
  while at >= 0 and #found < 3 * limit do
    local low = down and math.max(0, at - limit + 1) or at
    local entries = call('LRANGE', W, low, down and at or at + limit - 1)
    if #entries == 0 then return end
    for i = 1, #entries do
      local entry = entries[down and #entries - i + 1 or i]
      local number = sub(entry, 1, 8)
      if entry ~= '' and number ~= mark and #found < 3 * limit then collect(sub(entry, 9), number) end
    end
    at = at + step * #entries
  end
end

if kind == 'w' then
  by_index()
elseif kind == 'unmet' then
  by_job()
elseif kind == 'z' or kind == 'unhandled' or kind == 'group_waiting' then
  by_member()
else
  by_score()
end
return found
