-- The consumer group through which the mirror reads the stream of changes; its one consumer has the same name.
--! keys log

local GROUP = 'mirror'

local function named(reply)
  local found = {}
  for i = 1, #reply, 2 do found[reply[i]] = reply[i + 1] end
  return found
end

-- Return the fields of the group; nil if it does not exist.
local function group_of_mirror()
  if redis.call('EXISTS', LOG) == 0 then return nil end
  for _, reply in ipairs(redis.call('XINFO', 'GROUPS', LOG)) do
    local group = named(reply)
    if group.name == GROUP then return group end
  end
end

-- Return the id of the last entry delivered to the group, or ''. It only ascends, unless Redis loses data or restores an
-- older copy.
local function mark_of(group)
  return group and group['last-delivered-id'] or ''
end
