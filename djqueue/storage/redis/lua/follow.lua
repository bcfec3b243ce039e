-- Follow the stream of changes through the mirror's consumer group, which is created if it does not exist.
--
-- ARGV: 1 the time; optionally id and number of the entry to go on after, with nothing left to acknowledge.
-- Returns the last delivered id ('' if the stream is gone), and id and number of the stream's last entry.
--! include mirror
--! keys log

local id, number = ARGV[2], ARGV[3]

if not id then
  -- Without ENTRIESREAD it has a gap, until a caller that has read all jobs goes on.
  redis.pcall('XGROUP', 'CREATE', LOG, GROUP, '0', 'MKSTREAM')
elseif redis.pcall('XGROUP', 'SETID', LOG, GROUP, id, 'ENTRIESREAD', number).err then
  return {'', '', 0}
else
  redis.call('XGROUP', 'DELCONSUMER', LOG, GROUP, GROUP)
end
local stream = named(redis.call('XINFO', 'STREAM', LOG))
return {mark_of(group_of_mirror()), stream['last-generated-id'], stream['entries-added']}
