-- Remove everything that a queue holds, before a snapshot is written to it.
--
-- KEYS: the key that closes the queue; where the jobs are kept until the keys of each are deleted, too; the set of such
--   names; buckets of metrics.
-- ARGV: the value of the first key before and after this; the name for what is left to delete; then fields and values of
--   `meta`, two empty ones, and fields and values of `groups`.
-- Messages to other queues are dropped, because all queues are cleared. What was received is remembered: a message may
-- still be on its way.
-- Returns 1, or 0 if the queue was cleared before.
--! include base job ready completion
--! keys drops

if call('GET', KEYS[FIXED + 1]) ~= ARGV[ARGS] then return answer(0) end
call('SET', KEYS[FIXED + 1], ARGV[ARGS + 1])
if call('EXISTS', JOBS) == 1 then
  call('RENAME', JOBS, KEYS[FIXED + 2])
  call('SADD', KEYS[FIXED + 3], ARGV[ARGS + 2])
end
-- Numbers go on ascending, so that no message, token or job is taken for an earlier one.
local last = call('HMGET', META, 'sent', 'token', 'rear')
call('UNLINK', META, ST, W, Z, UNHANDLED, DUE, GROUP_WAITING, GROUP_READY, GROUP_ACTIVE, GROUPS, RATES, UNMET, TTL, LEASE, FINISHED, DEAD, DEAD_LETTERS, AUTO_RETRIES, UNIQ, UNIQTTL, DEPS, HOLDS, NEEDS, HIST, PROG, DROPS, SIZES, RESULTS, DETAILS, ABOUT)
for i = FIXED + 4, #KEYS do call('UNLINK', KEYS[i]) end
call('DEL', OUTBOX, LOG)
local key = META
for i, field in ipairs({'sent', 'token', 'rear'}) do
  if last[i] and #ARGV >= ARGS + 3 then call('HSET', META, field, last[i]) end
end
for i = ARGS + 3, #ARGV, 2 do
  if ARGV[i] == '' and key == META then key = GROUPS else call('HSET', key, ARGV[i], ARGV[i + 1]) end
end
changed, has_outbox = {}, false
unchanged = true
call('UNLINK', VERSION)
return answer(1)
