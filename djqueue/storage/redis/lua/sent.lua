-- Forget the messages that have been received, up to a number.
--! include base

local upto = tonumber(ARGV[ARGS])
local first = call('LINDEX', OUTBOX, 0)
while first and tonumber(decode(first)[1]) <= upto do
  call('LPOP', OUTBOX)
  first = call('LINDEX', OUTBOX, 0)
end
if not first and call('HLEN', META) == 1 and call('HEXISTS', META, 'sent') == 1 then
  call('DEL', META) -- of a queue that is there no more
end
unchanged = true
return answer(0)
