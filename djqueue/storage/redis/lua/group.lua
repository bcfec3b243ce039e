-- Limit or pause a group, or (group '') limit all to which nothing else was said.
--
-- Arguments: the verb (limit, pause, resume), the group, what the settings say of groups; for all groups, the one
-- behind which to go on; for 'limit' the limit, the rate (capacity / per) and the weight, of each '-' to leave it, or
-- '' to take back what was said. Answers with the last of up to a hundred groups, or '' for the end.
--! include base job ready

local verb, group = ARGV[ARGS], ARGV[ARGS + 1]
configure_groups(ARGV[ARGS + 2])

local function say()
  local paused, limit, capacity, per, weight = string.match(call('HGET', GROUPS, group) or '0', '^(.)(%d*)/?(%d*)/?(%d*)/?(%d*)$')
  if verb == 'limit' then
    local words, rate = {unpack(ARGV, ARGS + 4)}, capacity .. '/' .. per
    limit = words[1] == '-' and limit or words[1]
    rate = words[2] == '-' and rate or words[2]
    weight = words[3] == '-' and weight or words[3]
    capacity, per = string.match(rate, '^(%d*)/?(%d*)$')
  else
    paused = verb == 'pause' and '1' or '0'
  end
  if paused .. limit .. capacity .. weight == '0' then
    call('HDEL', GROUPS, group)
  else
    call('HSET', GROUPS, group, table.concat({paused .. limit, capacity, per, weight}, '/'))
  end
  if call('EXISTS', META) == 0 then numbers('rear', 0) end -- the queue is there from now on
  call('HINCRBY', META, 'said', 1)
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

local after = ARGV[ARGS + 3]
if after == '' then say() end
woken = true
if group ~= '' then
  regroup(group)
  return answer('')
end
return answer(each_group(after))
