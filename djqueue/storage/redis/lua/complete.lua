-- Complete active jobs whose end concerns no other key, and whose result is kept for the default time.
--
-- `complete_plain` collects the changes of one job; `write_completed` writes those of all but their states: the caller
-- writes `st_changes`, together with its own.
--! include layout
--! keys finished lease

local st_changes, complete_plain, write_completed = {}, nil, nil
do
  local ids, scores = {}, {}
  local timestamps = pack('>I8I8', now, now + RESULT_TTL)
  local expires = string.format('%.0f', now + RESULT_TTL)

  -- result: nil or false for none.
  function complete_plain(id, st, result_key, result)
    local n = #st_changes
    st_changes[n + 1] = id
    st_changes[n + 2] = COMPLETED .. sub(st, 2, 9) .. timestamps .. sub(st, 10) --@ complete: active -> completed
    ids[#ids + 1] = id
    scores[n + 1], scores[n + 2] = expires, id
    if result then call('SET', result_key, result, 'PX', RESULT_TTL_TEXT) end
    note(id, COMPLETED)
    if is_watched(id) then
      events[#events + 1] = {id, name_of(call('HGET', JOBS, id)), 'completed', 'completed', now}
    end
  end

  -- others: how many jobs were completed otherwise.
  function write_completed(others)
    variadic('ZADD', FINISHED, scores)
    variadic('ZREM', LEASE, ids)
    add(COMPLETED, #ids + others)
  end
end
