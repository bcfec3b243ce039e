-- Complete the jobs of the outcomes, which were checked; their new states are added to the `n` values of `st_changes`.
--
-- A script that inserts it has their ids first in `ids`, their states in `sts`, `ends`, and their results in the arguments after `last`.
-- `ends` joins, of each, its kind (c with a result, n without) and the beginning of its state (code and token).
local scores = {nil, nil}
local timestamps, expires = pack('>I8I8', now, now + RESULT_TTL), format('%d', now + RESULT_TTL)
local results = 0
for i = 1, outcomes do
  local id = ids[i]
  st_changes[n + 1] = id
  st_changes[n + 2] = COMPLETED .. sub(ends, 10 * i - 7, 10 * i) .. timestamps .. sub(sts[i], 10) --@ complete: active -> completed
  scores[n + 1], scores[n + 2] = expires, id
  n = n + 2
  if byte(ends, 10 * i - 9) == RESULT_BYTE then
    results = results + 1
    call('SET', KEYS[FIXED + results], ARGV[last + results], 'PX', RESULT_TTL_TEXT)
  end
end
call('ZADD', FINISHED, unpack(scores, 1, n))
