-- Remove details of ended jobs before their records: results, attempts, log lines.
--
-- KEYS: of each, the job's result, log lines and items; items go with the result.
-- ARGV: 'over' (expired) or 'surplus' (results above so many bytes), that number; then 'r', 'h' or 'l' .. id of each.
-- Returns how many were removed.
--! include base
--! keys hist sizes results details

local is_surplus, limit = ARGV[ARGS] == 'surplus', tonumber(ARGV[ARGS + 1])

local function is_over(due)
  return due and tonumber(due) <= now
end

local function forget_result(id, result_key, items_key)
  local due = call('ZSCORE', RESULTS, id)
  local kept = due and call('HGET', SIZES, id)
  if not kept then return 0 end
  if is_surplus and tonumber(call('HGET', META, 'Br') or 0) <= limit or not is_surplus and not is_over(due) then
    return 0
  end
  local _, result = unpack_number('>I4I4', kept)
  call('HSET', SIZES, id, sub(kept, 1, 4) .. pack('>I4', 0))
  call('ZREM', RESULTS, id)
  add('Br', -result)
  call('UNLINK', result_key, items_key)
  return 1
end

local gone = 0
for i = ARGS + 2, #ARGV do
  local what, id, key = sub(ARGV[i], 1, 1), sub(ARGV[i], 2), FIXED + 3 * (i - ARGS - 2)
  if what == 'r' then
    gone = gone + forget_result(id, KEYS[key + 1], KEYS[key + 3])
  elseif is_over(call('ZSCORE', DETAILS, ARGV[i])) then
    call('ZREM', DETAILS, ARGV[i])
    if what == 'h' then call('HDEL', HIST, id) else call('UNLINK', KEYS[key + 2]) end
    gone = gone + 1
  end
end
return answer(gone)
