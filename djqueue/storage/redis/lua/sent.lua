-- Remove delivered messages from the outbox.
--
-- ARGV: the number of the last one.
--! include base

local upto = tonumber(ARGV[ARGS])
local first = call('LINDEX', OUTBOX, 0)
while first and tonumber(decode(first)[1]) <= upto do
  call('LPOP', OUTBOX)
  first = call('LINDEX', OUTBOX, 0)
end
if not first and call('HLEN', META) == 1 and call('HEXISTS', META, 'sent') == 1 then
  call('DEL', META) -- the queue does not exist any more
end
unchanged = true
return answer(0)
