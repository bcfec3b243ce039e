-- The next changes for the mirror: those that it was given and has not acknowledged, or else new ones.
--
-- Arguments: how many entries at most. Answers a word, the id of the last entry that was given before, what the
-- queue was told (paused, limited, capacity, per, concurrency), and the entries, each with its id and its list of
-- job ids. Words: 'new' if nobody follows the stream; 'gap' if entries were trimmed away that were never given, or
-- not acknowledged; 'go' otherwise.
--! keys log meta

local call = redis.call
local GROUP = 'mirror'

local function named(reply)
  local found = {}
  for i = 1, #reply, 2 do found[reply[i]] = reply[i + 1] end
  return found
end

local function group_of_mirror()
  if call('EXISTS', LOG) == 0 then return nil end
  for _, reply in ipairs(call('XINFO', 'GROUPS', LOG)) do
    local group = named(reply)
    if group.name == GROUP then return group end
  end
end

local word, last, entries = 'new', '0-0', {}
local group = group_of_mirror()
if group then
  last = group['last-delivered-id']
  local stream = named(call('XINFO', 'STREAM', LOG))
  local given, trimmed = group['entries-read'], stream['entries-added'] - stream.length
  word = given and trimmed <= given and 'go' or 'gap'
end
if word == 'go' then
  local from = group.pending > 0 and '0' or '>'
  local reply = call('XREADGROUP', 'GROUP', GROUP, GROUP, 'COUNT', ARGV[2], 'STREAMS', LOG, from)
  for _, entry in ipairs(reply and reply[1][2] or {}) do
    local fields = entry[2]
    if not fields or not fields[2] then
      word, entries = 'gap', {}
      break
    end
    entries[#entries + 1] = {entry[1], fields[2]}
  end
end
return {word, last, call('HMGET', META, 'paused', 'limited', 'capacity', 'per', 'concurrency'), entries}
