-- The same as `read`, for many jobs at once. Arguments: ids. Keys: of all the results, then of all the log lines.
-- Answers the time, the last entry that was given to the mirror, and of each job: record, state, result, progress,
-- history, log lines.
--! include mirror
--! keys jobs st hist prog

local call = redis.call
local time = call('TIME')
local now = tonumber(ARGV[1]) or time[1] * 1000 + math.floor(time[2] / 1000)
local many = #ARGV - 1

local results, lines = {}, {}
for i = 1, many do
  results[i], lines[i] = KEYS[FIXED + i], KEYS[FIXED + many + i]
end
local blobs, sts = call('HMGET', JOBS, unpack(ARGV, 2)), call('HMGET', ST, unpack(ARGV, 2))
local values = call('MGET', unpack(results))
local progress, runs = call('HMGET', PROG, unpack(ARGV, 2)), call('HMGET', HIST, unpack(ARGV, 2))
local logged = call('EXISTS', unpack(lines)) > 0

local replies = {}
for i = 1, many do
  local mine = logged and call('LRANGE', lines[i], 0, -1) or {}
  replies[i] = blobs[i] and {blobs[i], sts[i], values[i], progress[i], runs[i], mine}
end
return {string.format('%.0f', now), mark_of(group_of_mirror()), replies}
