-- Add the leases of the `count` claims, which begin at the third of `leases`, and remove those of the completed jobs.
--
-- A sorted set of few and short members is searched from one end. A long member, which is removed at once, has Redis
-- build an index, which the leases of many jobs need. No id has this byte, which UTF-8 never uses.
if outcomes > 0 and count >= 16 then
  leases[2] = string.rep('\255', 65)
  call('ZADD', LEASE, unpack(leases, 1, 2 * count + 2))
  call('ZREM', LEASE, leases[2], unpack(ARGV, first + 1, last))
else
  if count > 0 then call('ZADD', LEASE, unpack(leases, 3, 2 * count + 2)) end
  if outcomes > 0 then call('ZREM', LEASE, unpack(ARGV, first + 1, last)) end
end
