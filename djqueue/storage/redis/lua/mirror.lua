-- The consumer group by which the mirror reads the stream of changes, with one consumer of the same name.
--! keys log

local GROUP = 'mirror'

local function named(reply)
  local found = {}
  for i = 1, #reply, 2 do found[reply[i]] = reply[i + 1] end
  return found
end

-- What Redis says of the group; nil if there is none.
local function group_of_mirror()
  if redis.call('EXISTS', LOG) == 0 then return nil end
  for _, reply in ipairs(redis.call('XINFO', 'GROUPS', LOG)) do
    local group = named(reply)
    if group.name == GROUP then return group end
  end
end

-- The last entry that was given to it, '' without one. It only moves on, unless Redis loses its data or goes back
-- to an older state of it.
local function mark_of(group)
  return group and group['last-delivered-id'] or ''
end
