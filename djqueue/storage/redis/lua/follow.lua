-- Follow the stream of changes, unless that is so already. With an entry's id and number: go on
-- behind it, with nothing left to be acknowledged. Answers the last entry that was given ('' if the stream has gone
-- meanwhile), and the id and the number of the last one that there is.
--! include mirror
--! keys log

local id, number = ARGV[2], ARGV[3]

if not id then
  -- Without ENTRIESREAD it has a gap, until somebody who has looked at all jobs goes on.
  redis.pcall('XGROUP', 'CREATE', LOG, GROUP, '0', 'MKSTREAM')
elseif redis.pcall('XGROUP', 'SETID', LOG, GROUP, id, 'ENTRIESREAD', number).err then
  return {'', '', 0}
else
  redis.call('XGROUP', 'DELCONSUMER', LOG, GROUP, GROUP)
end
local stream = named(redis.call('XINFO', 'STREAM', LOG))
return {mark_of(group_of_mirror()), stream['last-generated-id'], stream['entries-added']}
