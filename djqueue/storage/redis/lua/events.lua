-- Read entries of the stream of changes.
--
-- ARGV: 1 the time, first and last id as XRANGE takes them, maximum number of entries.
-- Returns {number of entries ever added, number of entries, last id, entries, whether there are jobs if there is no
--   stream}; each entry is id, job ids (MessagePack), state codes ('' if unknown; see `note` in base.lua).
--! include mirror
--! keys log jobs

if redis.call('EXISTS', LOG) == 0 then return {0, 0, '', {}, redis.call('EXISTS', JOBS)} end
local stream = named(redis.call('XINFO', 'STREAM', LOG))

local replies, n = {}, 0
for _, entry in ipairs(redis.call('XRANGE', LOG, ARGV[2], ARGV[3], 'COUNT', ARGV[4])) do
  local fields = entry[2]
  replies[n + 1], replies[n + 2], replies[n + 3] = entry[1], fields[2], fields[4] or ''
  n = n + 3
end
return {stream['entries-added'], stream.length, stream['last-generated-id'], replies, 0}
