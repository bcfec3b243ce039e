-- Put a chunk of jobs aside. The first of a part says when all of it expires.
--
-- Keys: the chunks of the part, by their numbers; the names of the write's parts. Arguments, behind the time: the
-- chunk's number, the chunk, the part's name, milliseconds until they expire.

redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
redis.call('SADD', KEYS[2], ARGV[4])
for i = 1, 2 do
  if redis.call('PTTL', KEYS[i]) < 0 then redis.call('PEXPIRE', KEYS[i], ARGV[5]) end
end
return 1
