-- Follow the stream of changes from its beginning, unless that is so already. With an entry's id and number: go on
-- behind it, with nothing left to be acknowledged. Answers whether it is followed, and the id and the number of
-- the last entry.
--! keys log

local GROUP = 'mirror'
local id, number = ARGV[2], ARGV[3]

if not id then
  redis.pcall('XGROUP', 'CREATE', LOG, GROUP, '0', 'MKSTREAM', 'ENTRIESREAD', '0')
elseif redis.pcall('XGROUP', 'SETID', LOG, GROUP, id, 'ENTRIESREAD', number).err then
  return {0, '', 0} -- it has gone meanwhile, with its queue
else
  redis.call('XGROUP', 'DELCONSUMER', LOG, GROUP, GROUP)
end

local last, added = '', 0
local reply = redis.call('XINFO', 'STREAM', LOG)
for i = 1, #reply, 2 do
  if reply[i] == 'last-generated-id' then last = reply[i + 1] end
  if reply[i] == 'entries-added' then added = reply[i + 1] end
end
return {1, last, added}
