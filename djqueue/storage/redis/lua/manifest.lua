-- Begin, look at or end the publication of a write: see `djqueue.storage.staging`.
--
-- KEYS: the publication, the results of its chunks, and their totals; then the chunks of each part.
-- ARGV: 1 the time; 'begin', version, write, parts (MessagePack) and milliseconds for which an ended publication is known
--   ('' forever), then the number of chunks of each part; or 'end', version, and 1 if chunks may be unpublished; or 'drop',
--   version and write.
-- Returns {result of 'begin', version, write, parts, totals of an ended publication}; for 'end' the totals, too, or
--   'unpublished'; for 'drop' 1, or 0 if a chunk was published.
-- A publication that was begun, and its parts, can be resumed for RESUMABLE; beginning it again renews that.
--! include versions

local RESUMABLE = 7 * DAY -- how long an unfinished publication can be resumed
local operation, version = ARGV[2], ARGV[3]
local stored = redis.call('HMGET', KEYS[1], 'version', 'state', 'write', 'parts', 'counts', 'lifetime')
local last = stored[1]

if operation == 'begin' then
  if last and (stored[2] == 'done' and last == version or is_later(last, version)) then
    return {'done', stored[1], stored[3], stored[4], stored[5] or ''}
  end
  if last and stored[2] == 'open' then
    if stored[3] == ARGV[4] then
      for at = 3, #KEYS do redis.call('PEXPIRE', KEYS[at], RESUMABLE) end
      if stored[6] ~= '' then
        for at = 1, 2 do redis.call('PEXPIRE', KEYS[at], RESUMABLE) end
      end
    end
    return {last == version and 'resumed' or 'unfinished', stored[1], stored[3], stored[4], ''}
  end
  for at = 3, #KEYS do
    -- A part that was lost while its task was running, or in a failover, has only some of its chunks.
    if redis.call('HLEN', KEYS[at]) < tonumber(ARGV[at + 4]) then return {'missing', ARGV[3], ARGV[4], ARGV[5], ''} end
  end
  for at = 3, #KEYS do redis.call('PEXPIRE', KEYS[at], RESUMABLE) end
  redis.call('HSET', KEYS[1], 'version', ARGV[3], 'state', 'open', 'write', ARGV[4], 'parts', ARGV[5], 'lifetime', ARGV[6])
  redis.call('HDEL', KEYS[1], 'counts')
  -- A publication without a name of its own cannot be resumed later: staged.lua has its results expire with it.
  if ARGV[6] == '' then redis.call('PERSIST', KEYS[1]) else redis.call('PEXPIRE', KEYS[1], RESUMABLE) end
  -- Results are left only if the server evicted their publication. The parts of another session may have the same names.
  redis.call('UNLINK', KEYS[2])
  return {'new', ARGV[3], ARGV[4], ARGV[5], ''}
end

if operation == 'drop' then
  local is_mine = last == version and stored[3] == ARGV[4]
  if redis.call('EXISTS', KEYS[2]) == 1 or is_mine and stored[2] == 'done' then return 0 end
  if is_mine then redis.call('DEL', KEYS[1]) end
  return 1
end

if last ~= version then return {'gone', stored[1] or '', '', '', ''} end
if stored[2] == 'done' then return {'done', stored[1], stored[3], stored[4], stored[5]} end
local totals = redis.call('HMGET', KEYS[2], '=0', '=1', '=2', '=3', '=4')
local sums, fields = {0, 0, 0, 0}, 0
for at = 1, 5 do
  if totals[at] then
    fields = fields + 1
    if at > 1 then sums[at - 1] = tonumber(totals[at]) end
  end
end
local published = redis.call('HLEN', KEYS[2]) - fields
if ARGV[4] ~= '1' then
  local chunks = 0
  for _, kinds in pairs(cmsgpack.unpack(stored[4])) do chunks = chunks + #kinds end
  if published < chunks then return {'unpublished', stored[1], stored[3], '', ''} end
end
if tonumber(totals[1] or 0) < published then
  -- An earlier version of djqueue published some of the chunks, without counting them.
  sums = {0, 0, 0, 0}
  local results = redis.call('HGETALL', KEYS[2])
  for i = 1, #results, 2 do
    if string.sub(results[i], 1, 1) ~= '=' then
      for at, count in ipairs(cmsgpack.unpack(results[i + 1])) do sums[at] = sums[at] + count end
    end
  end
end
local counts = cmsgpack.pack(sums)
redis.call('HSET', KEYS[1], 'state', 'done', 'counts', counts)
redis.call('HDEL', KEYS[1], 'parts')
redis.call('UNLINK', KEYS[2])
if stored[6] ~= '' then redis.call('PEXPIRE', KEYS[1], stored[6]) end
return {'done', stored[1], stored[3], '', counts}
