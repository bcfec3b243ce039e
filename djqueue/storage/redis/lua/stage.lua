-- Stage a chunk of jobs. All chunks of a part expire together, counted from the first one.
--
-- KEYS: the part's chunks by number, the names of the write's parts.
-- ARGV: 1 the time, the chunk's number, the chunk, the part's name, milliseconds until the part expires;
--   the number of chunks that earlier calls have staged.
-- Returns 0 if any of these is missing.

if tonumber(ARGV[6]) > redis.call('HLEN', KEYS[1]) then return 0 end

redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
redis.call('SADD', KEYS[2], ARGV[4])
for i = 1, 2 do
  if redis.call('PTTL', KEYS[i]) < 0 then redis.call('PEXPIRE', KEYS[i], ARGV[5]) end
end
return 1
