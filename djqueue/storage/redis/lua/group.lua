-- Limit or pause a group, or (group '') limit all that have no limit of their own.
--
-- Arguments: the verb (limit, pause, resume), the group, its limit ('' takes back what was said), the group limit; for
-- all groups, the one behind which to go on. Answers with the last of up to a hundred groups, or '' for the end.
--! include base job places

local verb, group, limit = ARGV[ARGS], ARGV[ARGS + 1], ARGV[ARGS + 2]
group_limit = tonumber(ARGV[ARGS + 3])

local function say()
  local said = call('HGET', GROUPS, group) or '0'
  local paused, own = sub(said, 1, 1), sub(said, 2)
  if verb == 'limit' then own = limit else paused = verb == 'pause' and '1' or '0' end
  if paused .. own == '0' then
    call('HDEL', GROUPS, group)
  else
    call('HSET', GROUPS, group, paused .. own)
  end
  if call('EXISTS', META) == 0 then numbers('rear', 0) end -- the queue is there from now on
end

-- Those that have jobs, in order: of each, one look at its first entry.
local function each_group(after)
  local last = after
  for _ = 1, 100 do
    local nearest
    for _, key in ipairs({PARKS, HEADS}) do
      local found = call('ZRANGEBYLEX', key, last == '' and '-' or '(' .. last .. AFTER, '+', 'LIMIT', 0, 1)[1]
      local name = found and sub(found, 1, string.find(found, NUL, 1, true) - 1)
      if name and (not nearest or name < nearest) then nearest = name end
    end
    if not nearest then return '' end
    last = nearest
    regroup(last)
  end
  return last
end

local after = ARGV[ARGS + 4]
if after == '' then say() end
woken = true
if group ~= '' then
  regroup(group)
  return answer('')
end
return answer(each_group(after))
