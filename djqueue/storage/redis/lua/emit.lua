-- Append items of attempts whose tokens hold.
--
-- KEYS: of each job, its items.
-- ARGV: of each its id, token, number of items before these, number of items, items.
-- Returns for each 1, or 0 if the token does not hold or items before these are missing.
--! include base job

-- Append only what is not there yet.
local function append(key, there, from, upto)
  if not there or there == 0 then call('DEL', key) end -- left by an earlier attempt or by an obliterated queue
  local new = {}
  for at = from, upto do new[#new + 1] = ARGV[at] end
  variadic('RPUSH', key, new)
end

local replies, at, key = {}, ARGS, FIXED
while at <= #ARGV do
  local id, token, first, count = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  key = key + 1
  local st, reply = call('HGET', ST, id), 0
  if holds(st, token) then
    local job = parse(id, call('HGET', JOBS, id), st)
    local there = job.b[ITEMS]
    if first <= (there or 0) then reply = 1 end
    if reply == 1 and first + count > (there or 0) then
      append(KEYS[key], there, at + 4 + (there or 0) - first, at + 3 + count)
      job.b[ITEMS] = first + count
      save(job) --@ nothing changes: it stays active
      emit_event(id, job.name, 'item', 'active', job.b[ITEMS])
    end
  end
  replies[#replies + 1] = reply
  at = at + 4 + count
end
return answer(replies)
