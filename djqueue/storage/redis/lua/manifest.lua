-- Begin, look at, or end the publication of a write: see `djqueue.storage.staging`.
--
-- Keys: the publication; what became of its chunks; then the chunks of each part.
-- Arguments, behind the time: 'begin' with version, write, parts (MessagePack) and milliseconds for which an
-- ended one is known ('' for ever); 'end' with version. Answers what `begin` found, version, write, parts, and the
-- numbers of a done one; for 'end' those numbers.

local RESUMABLE = 604800000 -- a week for somebody to go on with what was begun
local verb, version = ARGV[2], tonumber(ARGV[3])
local there = redis.call('HMGET', KEYS[1], 'version', 'state', 'write', 'parts', 'counts', 'lifetime')
local last = tonumber(there[1])

if verb == 'begin' then
  if last and (there[2] == 'done' and last >= version or last > version) then
    return {'done', there[1], there[3], there[4], there[5] or ''}
  end
  if last and there[2] == 'open' then
    return {last == version and 'resumed' or 'unfinished', there[1], there[3], there[4], ''}
  end
  for at = 3, #KEYS do
    if redis.call('PEXPIRE', KEYS[at], RESUMABLE) == 0 then return {'missing', ARGV[3], ARGV[4], ARGV[5], ''} end
  end
  redis.call('HSET', KEYS[1], 'version', ARGV[3], 'state', 'open', 'write', ARGV[4], 'parts', ARGV[5], 'lifetime', ARGV[6])
  redis.call('HDEL', KEYS[1], 'counts')
  redis.call('PERSIST', KEYS[1])
  return {'new', ARGV[3], ARGV[4], ARGV[5], ''}
end

if last ~= version then return {'gone', there[1] or '', '', '', ''} end
if there[2] == 'done' then return {'done', there[1], there[3], there[4], there[5]} end
local sums = {0, 0, 0, 0}
local told = redis.call('HVALS', KEYS[2])
for _, packed in ipairs(told) do
  local numbers = cmsgpack.unpack(packed)
  for at = 1, #numbers do sums[at] = sums[at] + numbers[at] end
end
local counts = cmsgpack.pack(sums)
redis.call('HSET', KEYS[1], 'state', 'done', 'counts', counts)
redis.call('HDEL', KEYS[1], 'parts')
redis.call('DEL', KEYS[2])
if there[6] ~= '' then redis.call('PEXPIRE', KEYS[1], there[6]) end
return {'done', there[1], there[3], '', counts}
