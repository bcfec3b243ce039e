-- Return the state codes of jobs; '' for a job that does not exist or has expired.
--
-- ARGV: 1 the time; then the ids.
--! include reading
--! keys jobs st

local replies = {}
for i = 2, #ARGV do
  local st = call('HGET', ST, ARGV[i])
  local reply = ''
  if st then
    reply = has_expired(st) and '' or sub(st, 1, 1)
  elseif call('HEXISTS', JOBS, ARGV[i]) == 1 then
    reply = WAITING
  end
  replies[i - 1] = reply
end
return replies
