-- Publish events of jobs that are subscribed to. A script inserts it where something is subscribed to.
local watches_all = watching and tonumber(call('HGET', WATCH, '*') or 0) > clock

local function is_watched(id)
  return watching and (watches_all or tonumber(call('HGET', WATCH, '=' .. id) or 0) > clock)
end

-- Publish an event of a job, if it is subscribed to.
local function emit_event(id, name, event, state, count)
  if is_watched(id) then events[#events + 1] = {id, name, event, state, now, count} end
end
