-- Subscribe to events: all ('*') or those of a job ('=' .. id).
--
-- ARGV: 1 the time, milliseconds; then '*' or '=' .. id of each.
--! include common
--! keys watch meta

local duration = tonumber(ARGV[2])
for i = 3, #ARGV do
  call('HSET', WATCH, ARGV[i], string.format('%.0f', clock + duration))
end
call('PEXPIRE', WATCH, duration)
call('HDEL', META, 'plain') -- see finish_and_claim_plain.lua
return 1
