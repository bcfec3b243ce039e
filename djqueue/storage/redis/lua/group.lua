-- Limit, pause or resume a group; or, with the name '', set the defaults for all groups.
--
-- ARGV: the operation (limit, pause, resume), the group, the configuration of groups, and, for the defaults, the group
--   after which to go on; then for 'limit' the limit, the rate (capacity / per) and the weight: '-' leaves a value as it
--   is, '' removes the override.
-- Returns the last of up to a hundred groups that were updated, or '' at the end.
--! include base job ready group_names

local operation, group = ARGV[ARGS], ARGV[ARGS + 1]
configure_groups(ARGV[ARGS + 2])

local function write_rules()
  local paused, limit, capacity, per, weight = string.match(call('HGET', GROUPS, group) or '0', GROUP_RULES)
  if operation == 'limit' then
    local words, rate = {unpack(ARGV, ARGS + 4)}, capacity .. '/' .. per
    limit = words[1] == '-' and limit or words[1]
    rate = words[2] == '-' and rate or words[2]
    weight = words[3] == '-' and weight or words[3]
    capacity, per = string.match(rate, '^(%d*)/?(%d*)$')
  else
    paused = operation == 'pause' and '1' or '0'
  end
  if paused .. limit .. capacity .. weight == '0' then
    call('HDEL', GROUPS, group)
  else
    call('HSET', GROUPS, group, table.concat({paused .. limit, capacity, per, weight}, '/'))
  end
  if call('EXISTS', META) == 0 then next_numbers('rear', 0) end -- the queue exists from now on
  call('HINCRBY', META, 'group_revision', 1)
end

-- Update the groups that have waiting jobs, in order.
local function each_group(after)
  local last = after
  for _ = 1, 100 do
    local name = next_group(last)
    if not name then return '' end
    last = name
    regroup(last)
  end
  return last
end

local after = ARGV[ARGS + 3]
if after == '' then write_rules() end
woken = true
if group ~= '' then
  regroup(group)
  return answer('')
end
return answer(each_group(after))
