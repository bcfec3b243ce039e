-- Forget completed and cancelled jobs whose records' time is over, many at a time; see `remove` for the others.
-- Arguments: the ids. Keys: of each its result and its log lines.
--! include base
--! keys finished hist prog

local ids, gone, counts = {}, {}, {c = 0, x = 0}
local sts = call('HMGET', ST, unpack(ARGV, ARGS))
for i = 1, #sts do
  local st, id = sts[i], ARGV[ARGS + i - 1]
  local letter = st and sub(st, 1, 1)
  local expires = counts[letter or ''] and unpack_number('>I8', st, 18)
  if expires and expires ~= 0 and expires <= now then
    counts[letter] = counts[letter] + 1
    ids[#ids + 1] = id
    gone[#gone + 1], gone[#gone + 2] = KEYS[FIXED + 2 * i - 1], KEYS[FIXED + 2 * i]
    note(id)
    if watching then
      local blob = call('HGET', JOBS, id)
      local name = sub(blob, 20, 19 + unpack_number('>I2', blob, 18))
      tell(id, name, 'removed', letter == 'c' and 'completed' or 'cancelled')
    end
  end
end
if #ids > 0 then
  variadic('HDEL', JOBS, ids)
  variadic('HDEL', ST, ids)
  variadic('ZREM', FINISHED, ids)
  if call('EXISTS', HIST) == 1 then variadic('HDEL', HIST, ids) end
  if call('EXISTS', PROG) == 1 then variadic('HDEL', PROG, ids) end
  for first = 1, #gone, 4000 do
    call('UNLINK', unpack(gone, first, math.min(first + 3999, #gone)))
  end
  add('c', -counts.c)
  add('x', -counts.x)
end
return answer(#ids)
