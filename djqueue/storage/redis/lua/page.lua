-- Some jobs of one structure, from a mark on. Arguments: the structure (w z asides parks due lease dead finished unmet),
-- how many, whether from its end ('1'), the mark ('' begins at the end) and its score; of finished, the letter wanted.
-- Answers for each its id, mark and score; also for those that are no job of the state, with '' for an id.
--! keys st w z asides parks due lease dead finished unmet

local call, sub, find = redis.call, string.sub, string.find
local kind, many, down, mark, score = ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1', ARGV[5], ARGV[6]
local keys = {due = DUE, lease = LEASE, dead = DEAD, finished = FINISHED, z = Z, asides = ASIDES, parks = PARKS}
local key, found = keys[kind], {}

local function put(id, its_mark, its_score)
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
  local low, high = down and math.max(0, first - many + 1) or first, down and first or first + many - 1
  if high < 0 then return end
  local entries = call('ZRANGE', key, low, high, 'WITHSCORES')
  for i = 1, #entries, 2 do
    local at = down and #entries - i or i
    local id = entries[at]
    -- Among the delayed jobs are groups that rest until a time.
    local is_wanted = sub(id, 1, 1) ~= '\0'
    if kind == 'finished' then is_wanted = sub(call('HGET', ST, id) or '', 1, 1) == ARGV[7] end
    put(is_wanted and id or '', id, entries[at + 1])
  end
end

local function by_member()
  local entries
  if down then
    entries = call('ZREVRANGEBYLEX', key, mark == '' and '+' or '(' .. mark, '-', 'LIMIT', 0, many)
  else
    entries = call('ZRANGEBYLEX', key, mark == '' and '-' or '(' .. mark, '+', 'LIMIT', 0, many)
  end
  for _, entry in ipairs(entries) do
    local at = kind == 'z' and 0 or find(entry, '%z', kind == 'asides' and 2 or 1)
    put(sub(entry, at + (kind == 'parks' and 9 or 13)), entry)
  end
end

-- Blocked jobs have an entry for each that they wait for.
local function by_job()
  for _ = 1, many do
    local entry
    if down then
      entry = call('ZREVRANGEBYLEX', UNMET, mark == '' and '+' or '(' .. mark .. '\0', '-', 'LIMIT', 0, 1)[1]
    else
      entry = call('ZRANGEBYLEX', UNMET, mark == '' and '-' or '[' .. mark .. '\1', '+', 'LIMIT', 0, 1)[1]
    end
    if not entry then return end
    mark = sub(entry, 1, find(entry, '%z') - 1)
    put(mark, mark)
  end
end

-- The first entry of the list whose number is not lower: they ascend, with holes.
local function index_of(number)
  local low, high = 0, call('LLEN', W)
  while low < high do
    local middle = math.floor((low + high) / 2)
    local at, entry = middle, call('LINDEX', W, middle)
    while entry == '' and at < high - 1 do
      at = at + 1
      entry = call('LINDEX', W, at)
    end
    if entry ~= '' and sub(entry, 1, 8) < number then low = at + 1 else high = middle end
  end
  return low
end

local function by_place()
  local step = down and -1 or 1
  local at = down and call('LLEN', W) - 1 or 0
  if mark ~= '' then at = index_of(mark) - (down and 1 or 0) end
  while at >= 0 and #found < 3 * many do
    local low = down and math.max(0, at - many + 1) or at
    local entries = call('LRANGE', W, low, down and at or at + many - 1)
    if #entries == 0 then return end
    for i = 1, #entries do
      local entry = entries[down and #entries - i + 1 or i]
      local number = sub(entry, 1, 8)
      if entry ~= '' and number ~= mark and #found < 3 * many then put(sub(entry, 9), number) end
    end
    at = at + step * #entries
  end
end

if kind == 'w' then
  by_place()
elseif kind == 'unmet' then
  by_job()
elseif kind == 'z' or kind == 'asides' or kind == 'parks' then
  by_member()
else
  by_score()
end
return found
