-- Count the changes in the stream, and those that the mirror has not copied.
--
-- ARGV: 1 the time, number of entries whose changes are counted.
-- Returns {entries added so far, entries not read or not acknowledged, changes in the last entries, their number}.
--! include mirror
--! keys log

if redis.call('EXISTS', LOG) == 0 then return {0, 0, 0, 0} end
local stream, group = named(redis.call('XINFO', 'STREAM', LOG)), group_of_mirror()
local added, waiting = stream['entries-added'], 0
local given = group and group['entries-read']
if given then waiting = added - given + group.pending end
local last, changes = redis.call('XREVRANGE', LOG, '+', '-', 'COUNT', ARGV[2]), 0
for _, entry in ipairs(last) do changes = changes + #(entry[2][4] or '') end
return {added, waiting, changes, #last}
