-- Read, at one moment, what may keep a job waiting.
--
-- ARGV: 1 the time, the id, the group limit, how many jobs before it are counted at most, how many active jobs are named.
-- Returns {time}, or {time, record, state entry or '', overrides and bucket of the queue, slots in use, end of its lease or
--   '', first active jobs (id, state entry), {overrides of its group, defaults of all groups, active jobs of its group,
--   until when the group pauses}, first active jobs of its group, number of jobs before it or -1, dependencies that it
--   waits for (queue, id), id of the active job with its unique key that it waits for or ''}.
--! include common layout list_position
--! keys jobs st meta w z unhandled due group_waiting group_ready group_active groups unmet lease uniq

local pack = struct.pack
local id, group_limit, limit, shown = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local PROBES, SECTIONS, LOOKED_AT = 64, 500, 1000

local blob, st = call('HGET', JOBS, id), call('HGET', ST, id)
if not blob then return {string.format('%.0f', now)} end
local o = cmsgpack.unpack(sub(blob, options_range(blob)))
local code, mark = st and sub(st, 1, 1) or 'w', st and sub(st, 2, 9) or sub(blob, 1, 8)
local group = group_limit > 0 and o.concurrency_key

-- Count the entries of the list whose number is lower.
local function before_in_list(number)
  local low = index_from(number, PROBES)
  if low > 2 * limit then return limit end
  local count = 0
  if low > 0 then
    for _, entry in ipairs(call('LRANGE', W, 0, low - 1)) do
      if entry ~= '' then count = count + 1 end
    end
  end
  return count
end

local function before()
  if code == 'g' then
    local first, entry = '[' .. group .. NUL, '(' .. group .. NUL .. mark .. id
    return call('ZLEXCOUNT', GROUP_READY, first, '(' .. group .. AFTER) + call('ZLEXCOUNT', GROUP_WAITING, first, entry)
  end
  if code ~= 'w' and code ~= 's' then return -1 end
  local priority = o.priority or 0
  local position = pack('>I4', PRIORITY_BASE - priority) .. mark
  local count = call('ZLEXCOUNT', Z, '-', '(' .. position)
  if priority < 0 then
    count = count + call('LLEN', W) - tonumber(call('HGET', META, 'holes') or 0)
  elseif priority == 0 then
    count = count + before_in_list(mark)
  end
  local after = '-'
  for _ = 1, SECTIONS do
    local found = call('ZRANGEBYLEX', UNHANDLED, after, '+', 'LIMIT', 0, 1)[1]
    if not found then break end
    -- The jobs of a name with a stalled attempt are a section of their own, which begins with NUL.
    local section = sub(found, 1, string.find(found, '%z', 2))
    count = count + call('ZLEXCOUNT', UNHANDLED, '[' .. section, '(' .. section .. position)
    after = '(' .. sub(section, 1, -2) .. AFTER
  end
  return math.min(limit, count)
end

local holders = {}
for _, one in ipairs(call('ZRANGE', LEASE, 0, shown - 1)) do
  holders[#holders + 1] = one
  holders[#holders + 1] = call('HGET', ST, one) or ''
end

local mates, rules, active = {}, {}, 0
if group then
  rules = call('HMGET', GROUPS, group, '')
  active = tonumber(call('HGET', GROUP_ACTIVE, group) or 0)
  local others = active > 0 and call('ZRANGE', LEASE, 0, LOOKED_AT - 1) or {}
  for _, one in ipairs(others) do
    local other = call('HGET', JOBS, one)
    if other then
      if cmsgpack.unpack(sub(other, options_range(other))).concurrency_key == group then
        mates[#mates + 1] = one
        mates[#mates + 1] = call('HGET', ST, one) or ''
      end
    end
    if #mates >= 2 * shown then break end
  end
end

local unmet, followed = {}, ''
for _, entry in ipairs(call('ZRANGEBYLEX', UNMET, '[' .. id .. NUL, '(' .. id .. AFTER, 'LIMIT', 0, LOOKED_AT)) do
  local rest = sub(entry, #id + 2)
  local at = string.find(rest, '%z')
  if at > 1 then
    unmet[#unmet + 1] = sub(rest, 1, at - 1)
    unmet[#unmet + 1] = sub(rest, at + 1)
  else
    local held = o.unique_key and call('HGET', UNIQ, o.unique_key)
    followed = held and sub(held, 17) or ''
  end
end

return {
  string.format('%.0f', now), blob, st or '',
  call('HMGET', META, 'paused', 'limited', 'capacity', 'per', 'concurrency', 'bucket', 'parts', 'filled', 'holds'),
  call('ZCARD', LEASE) + (call('HGET', META, 'e') or 0), call('ZSCORE', LEASE, id) or '',
  holders, {rules[1] or '', rules[2] or '', active, group and call('ZSCORE', DUE, NUL .. group) or ''}, mates, before(), unmet, followed,
}
