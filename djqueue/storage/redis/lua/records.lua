-- Read many jobs with all their parts, for the mirror.
--
-- KEYS: all results, then all log lines.
-- ARGV: 1 the time; then the ids.
-- Returns {time, last id delivered to the mirror, jobs}; each job is as in read.lua.
--! include common mirror
--! keys jobs st hist prog

local count = #ARGV - 1

local results, lines = {}, {}
for i = 1, count do
  results[i], lines[i] = KEYS[FIXED + i], KEYS[FIXED + count + i]
end
local blobs, sts = call('HMGET', JOBS, unpack(ARGV, 2)), call('HMGET', ST, unpack(ARGV, 2))
local values = call('MGET', unpack(results))
local progress, runs = call('HMGET', PROG, unpack(ARGV, 2)), call('HMGET', HIST, unpack(ARGV, 2))
local logged = call('EXISTS', unpack(lines)) > 0

local replies = {}
for i = 1, count do
  local mine = logged and call('LRANGE', lines[i], 0, -1) or {}
  replies[i] = blobs[i] and {blobs[i], sts[i], values[i], progress[i], runs[i], mine}
end
return {string.format('%.0f', now), mark_of(group_of_mirror()), replies}
