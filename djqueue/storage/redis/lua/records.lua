-- Read many jobs for the mirror, without the parts that have keys of their own.
--
-- ARGV: 1 the time; then the ids.
-- Returns {time, last id delivered to the mirror, records, state entries, progress, ended attempts}: lists in the order
--   of the ids, the last two empty if no job of the queue has any.
--! include common mirror
--! keys jobs st hist prog

local blobs, sts = call('HMGET', JOBS, unpack(ARGV, 2)), call('HMGET', ST, unpack(ARGV, 2))
local progress = call('EXISTS', PROG) == 1 and call('HMGET', PROG, unpack(ARGV, 2)) or {}
local runs = call('EXISTS', HIST) == 1 and call('HMGET', HIST, unpack(ARGV, 2)) or {}
return {string.format('%.0f', now), mark_of(group_of_mirror()), blobs, sts, progress, runs}
