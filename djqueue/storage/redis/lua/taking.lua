-- Take waiting jobs in their order: inserted in finish_and_claim.
--
-- Defines `take(limit)`, which removes up to `limit` jobs from the structures with waiting jobs, and returns the id and the
-- number's bytes of each. Jobs for which the worker has no handler may be among them.

-- Waiting jobs in order: {priority, number, id, the number's bytes, its structure or entry, its name if it is in
-- `unhandled`, whether it ends the claim}.
local function candidates(limit)
  local found = {}
  local function entry(priority, packed, id, structure, name)
    found[#found + 1] = {priority, unpack_number('>I8', packed), id, packed, structure, name}
  end
  for _, one in ipairs(call('ZRANGE', Z, 0, limit - 1)) do
    entry(unpack_number('>I4', one), sub(one, 5, 12), sub(one, 13), one)
  end
  local number, from, missing = 0, 0, limit
  while missing > 0 do
    local entries = call('LRANGE', W, from, from + missing - 1)
    if #entries == 0 then break end
    from, missing = from + #entries, 0
    for _, one in ipairs(entries) do
      if one == '' then
        number = number + 0.5 -- a hole keeps its position in the list
        missing = missing + 1 -- and takes no job's place, or one of a lower priority would have it
        found[#found + 1] = {PRIORITY_BASE, number, '', '', W}
      else
        entry(PRIORITY_BASE, sub(one, 1, 8), sub(one, 9), W)
        number = found[#found][2]
      end
    end
  end
  local function line(name, start, limit, is_last)
    local entries = call('ZRANGEBYLEX', UNHANDLED, '[' .. start .. NUL, '(' .. start .. AFTER, 'LIMIT', 0, limit)
    for _, one in ipairs(entries) do
      local rest = sub(one, #start + 2)
      entry(unpack_number('>I4', rest), sub(rest, 5, 12), sub(rest, 13), one, name)
      found[#found][7] = is_last
    end
  end
  for _, name in ipairs(names) do
    if call('HEXISTS', META, 'n:' .. name) == 1 then
      line(name, name, limit, false)
      -- A job with a stalled attempt ends a claim.
      if not claiming.skips then line(name, NUL .. name, 1, true) end
    end
  end
  table.sort(found, function(a, b)
    if a[1] ~= b[1] then return a[1] < b[1] end
    return a[2] < b[2]
  end)
  return found
end

local function drop_holes()
  while call('LINDEX', W, 0) == '' do
    call('LPOP', W)
    call('HINCRBY', META, 'holes', -1)
  end
end

-- Remove up to `limit` waiting jobs, in order. Those that the worker has no handler for move to `unhandled`.
local function take_in_order(limit)
  local taken = {}
  while #taken < limit and unhandled_count < 1000 do
    drop_holes()
    local found = candidates(limit)
    if #found == 0 then break end
    for _, one in ipairs(found) do
      if #taken == limit then break end
      local id, structure = one[3], one[5]
      local hole = id == ''
      if structure == W then
        call('LPOP', W)
      elseif one[6] then
        call('ZREM', UNHANDLED, structure)
      else
        call('ZREM', Z, structure)
      end
      if hole then
        call('HINCRBY', META, 'holes', -1)
      else
        local blob = call('HGET', JOBS, id)
        if blob and handled[name_of(blob)] then
          taken[#taken + 1] = {id, one[4]}
          if one[7] then return taken end
        elseif blob then
          mark_unhandled(id, one[4], blob, call('HGET', ST, id))
        end
      end
    end
  end
  return taken
end

function take(limit)
  if call('ZCARD', Z) > 0 or call('ZCARD', UNHANDLED) > 0 then
    return take_in_order(limit)
  end
  local taken, holes = {}, 0
  repeat
    local missing = limit - #taken -- holes take no job's place
    local entries = call('LPOP', W, missing) or {}
    for i = 1, #entries do
      local one = entries[i]
      if one == '' then
        holes = holes + 1
      else
        taken[#taken + 1] = {sub(one, 9), sub(one, 1, 8)}
      end
    end
  until #taken == limit or #entries < missing
  if holes > 0 then call('HINCRBY', META, 'holes', -holes) end
  return taken
end
