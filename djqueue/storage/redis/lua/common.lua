-- Shortcuts, and the time of the request.
--
-- ARGV: 1 milliseconds, '' for the server's clock.

local call, sub, floor, unpack_number = redis.call, string.sub, math.floor, struct.unpack
local time = call('TIME')
local clock = time[1] * 1000 + floor(time[2] / 1000)
local now = tonumber(ARGV[1]) or clock
