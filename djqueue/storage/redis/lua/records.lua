-- Read many jobs for the mirror, without the parts that have keys of their own.
--
-- ARGV: 1 the time, the size in bytes of the records after which a reply ends; then the ids.
-- Returns {time, last id delivered to the mirror, records, state entries, progress, ended attempts}: lists in the order
--   of the ids, of which the last may be left out; the last two are empty if no job of the queue has any.
--! include common mirror
--! keys jobs st hist prog

local most_bytes, blobs, size, step = tonumber(ARGV[2]), {}, 0, 1
while #blobs < #ARGV - 2 and size < most_bytes do
  local first = #blobs + 3
  local some = call('HMGET', JOBS, unpack(ARGV, first, math.min(first + step - 1, #ARGV)))
  for i = 1, #some do
    blobs[#blobs + 1] = some[i]
    size = size + (some[i] and #some[i] or 0)
  end
  step = math.max(1, math.min(2 * step, floor((most_bytes - size) * #blobs / math.max(size, 1))))
end
local last = #blobs + 2
local sts = call('HMGET', ST, unpack(ARGV, 3, last))
local progress = call('EXISTS', PROG) == 1 and call('HMGET', PROG, unpack(ARGV, 3, last)) or {}
local runs = call('EXISTS', HIST) == 1 and call('HMGET', HIST, unpack(ARGV, 3, last)) or {}
return {string.format('%.0f', now), mark_of(group_of_mirror()), blobs, sts, progress, runs}
