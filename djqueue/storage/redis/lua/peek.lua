-- Return {1} if a claim may find a job, or {0, milliseconds until one is due or -1}.
--
-- ARGV: 1 the time.
--! include common
--! keys w z unhandled due

if call('LLEN', W) > 0 or call('ZCARD', Z) > 0 or call('ZCARD', UNHANDLED) > 0 then
  return {1}
end
local due = call('ZRANGE', DUE, 0, 0, 'WITHSCORES')
if not due[2] then return {0, -1} end
local left = tonumber(due[2]) - now
if left <= 0 then return {1} end
return {0, left}
