-- Read the next changes for the mirror: those delivered before and not acknowledged, then new ones.
--
-- ARGV: 1 the time, maximum number of entries, the revision of group overrides that the caller knows ('' for none), the
--   last entry that the caller has read and not acknowledged ('' for none).
-- Returns {status, last id delivered before, last id delivered now, queue overrides (paused, limited, capacity, per,
--   concurrency, holds), entries (id, job ids), revision of group overrides, these if the revision is another one}.
--   Status: 'new' if the mirror does not follow the stream; 'gap' if entries were trimmed before they were delivered and
--   acknowledged; otherwise 'go'.
--! include mirror
--! keys log meta groups

local function read_from(id, count)
  local reply = redis.call('XREADGROUP', 'GROUP', GROUP, GROUP, 'COUNT', count, 'STREAMS', LOG, id)
  return reply and reply[1][2] or {}
end

local status, entries = 'new', {}
local group = group_of_mirror()
local before = mark_of(group)
local after = before
if group then
  local stream = named(redis.call('XINFO', 'STREAM', LOG))
  local given, trimmed = group['entries-read'], stream['entries-added'] - stream.length
  status = given and trimmed <= given and 'go' or 'gap'
end
if status == 'go' then
  local count, found = tonumber(ARGV[2]), {}
  if group.pending > 0 then found = read_from(ARGV[4] ~= '' and ARGV[4] or '0', count) end
  if #found < count then
    for _, entry in ipairs(read_from('>', count - #found)) do
      found[#found + 1], after = entry, entry[1]
    end
  end
  for _, entry in ipairs(found) do
    local fields = entry[2]
    if not fields or not fields[2] then
      status, entries = 'gap', {}
      break
    end
    entries[#entries + 1] = {entry[1], fields[2]}
  end
end
local limits = redis.call('HMGET', META, 'paused', 'limited', 'capacity', 'per', 'concurrency', 'holds')
local revision = redis.call('HGET', META, 'group_revision') or '0'
return {status, before, after, limits, entries, revision, revision ~= ARGV[3] and redis.call('HGETALL', GROUPS)}
