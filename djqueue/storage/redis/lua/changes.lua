-- The next changes for the mirror: those that it was given and has not acknowledged, or else new ones.
--
-- Arguments: how many entries at most, how often groups were told something when that was last looked at ('' if never).
-- Answers a word, the last entry that was given before and the one that is so now, what the queue was told (paused,
-- limited, capacity, per, concurrency), the entries, each with its id and its list of job ids, how often groups were
-- told something, and what, if that is more often. Words: 'new' if nobody follows the stream; 'gap' if entries were
-- trimmed away that were never given, or not acknowledged; 'go' otherwise.
--! include mirror
--! keys log meta groups

local word, entries = 'new', {}
local group = group_of_mirror()
local before = mark_of(group)
local after = before
if group then
  local stream = named(redis.call('XINFO', 'STREAM', LOG))
  local given, trimmed = group['entries-read'], stream['entries-added'] - stream.length
  word = given and trimmed <= given and 'go' or 'gap'
end
if word == 'go' then
  local from = group.pending > 0 and '0' or '>'
  local reply = redis.call('XREADGROUP', 'GROUP', GROUP, GROUP, 'COUNT', ARGV[2], 'STREAMS', LOG, from)
  for _, entry in ipairs(reply and reply[1][2] or {}) do
    local fields = entry[2]
    if not fields or not fields[2] then
      word, entries = 'gap', {}
      break
    end
    entries[#entries + 1] = {entry[1], fields[2]}
    if from == '>' then after = entry[1] end
  end
end
local told = redis.call('HMGET', META, 'paused', 'limited', 'capacity', 'per', 'concurrency')
local said = redis.call('HGET', META, 'said') or '0'
return {word, before, after, told, entries, said, said ~= ARGV[3] and redis.call('HGETALL', GROUPS)}
