-- Some entries of the stream of changes. Arguments: from which one and up to which one, as XRANGE has them, how many at
-- most, and whether the names of the jobs are wanted ('1').
-- Answers how many entries there have ever been, how many there are, the last one's id, and of each entry its id, the ids
-- of its jobs (MessagePack), what they have become (see `base`; '' is not known), and their names (MessagePack; '' for a
-- job that is not there); and, where there is no stream, whether there are jobs.
--! include mirror
--! keys log jobs

if redis.call('EXISTS', LOG) == 0 then return {0, 0, '', {}, redis.call('EXISTS', JOBS)} end
local stream = named(redis.call('XINFO', 'STREAM', LOG))

local function names_of(packed)
  local names = {}
  for i, id in ipairs(cmsgpack.unpack(packed)) do
    local blob = redis.call('HGET', JOBS, id)
    names[i] = blob and string.sub(blob, 20, 19 + struct.unpack('>I2', blob, 18)) or ''
  end
  return cmsgpack.pack(names)
end

local replies, n = {}, 0
for _, entry in ipairs(redis.call('XRANGE', LOG, ARGV[2], ARGV[3], 'COUNT', ARGV[4])) do
  local fields = entry[2]
  replies[n + 1], replies[n + 2], replies[n + 3] = entry[1], fields[2], fields[4] or ''
  replies[n + 4] = ARGV[5] == '1' and names_of(fields[2]) or ''
  n = n + 4
end
return {stream['entries-added'], stream.length, stream['last-generated-id'], replies, 0}
