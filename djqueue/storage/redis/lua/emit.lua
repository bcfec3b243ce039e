-- Items of runs whose tokens hold. Arguments: of each its id, token, how many items came before, how many these
-- are, and they. Keys: of each, its items.
--! include base job

-- Those that are there already are not kept again.
local function append(key, there, from, upto)
  if not there or there == 0 then call('DEL', key) end -- of an earlier run, or of an obliterated queue
  local new = {}
  for at = from, upto do new[#new + 1] = ARGV[at] end
  variadic('RPUSH', key, new)
end

local replies, at, key = {}, ARGS, FIXED
while at <= #ARGV do
  local id, token, first, many = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  key = key + 1
  local st, reply = call('HGET', ST, id), 0
  if holds(st, token) then
    local job = parse(id, call('HGET', JOBS, id), st)
    local there = job.b[ITEMS]
    if first <= (there or 0) then reply = 1 end
    if reply == 1 and first + many > (there or 0) then
      append(KEYS[key], there, at + 4 + (there or 0) - first, at + 3 + many)
      job.b[ITEMS] = first + many
      save(job) --@ nothing changes: it runs on
      tell(id, job.name, 'item', 'active', job.b[ITEMS])
    end
  end
  replies[#replies + 1] = reply
  at = at + 4 + many
end
return answer(replies)
