-- Extend the leases of claims whose tokens hold.
--
-- ARGV: the lease; then id and token of each.
-- Returns for each 1, 2 (extended, and the job is asked to stop) or 0.
--! include base job
--! keys lease

local until_when = now + tonumber(ARGV[ARGS])
local replies = {}
for i = ARGS + 1, #ARGV, 2 do
  local st = call('HGET', ST, ARGV[i])
  local reply = 0
  if holds(st, ARGV[i + 1]) then
    call('ZADD', LEASE, until_when, ARGV[i])
    reply = decode(sub(st, 10))[CANCEL] == 1 and 2 or 1
  end
  replies[#replies + 1] = reply
end
unchanged = true
return answer(replies)
