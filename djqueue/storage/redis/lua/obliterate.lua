-- Forget the queue. Arguments: whether also with active jobs ('1'); a name for what is left to be deleted.
-- Keys: where the jobs are put until what belongs to each is deleted, too; the set of such names.
-- Answers how many jobs there were, or -1 if active ones forbade it.
--! include base job places ends
--! keys inbox drops

local force, name = ARGV[ARGS] == '1', ARGV[ARGS + 1]
if call('ZCARD', LEASE) > 0 and not force then
  return answer(-1)
end
local many = call('HLEN', JOBS)

-- Those that wait for one of these jobs, or for which one waits, are to hear of it.
local last = false
for _, entry in ipairs(call('ZRANGE', DEPS, 0, -1)) do
  local id = sub(entry, 1, string.find(entry, NUL, 1, true) - 1)
  if id ~= last then
    last = id
    local waiting = call('ZRANGEBYLEX', DEPS, '[' .. id .. NUL, '(' .. id .. AFTER)
    for _, one in ipairs(waiting) do
      local who = decode(sub(one, #id + 10))
      if who[1] ~= ARGV[ARGS + 2] then
        send(who[1], {'ended', id, 'cancelled', who[2], who[3]})
      end
    end
  end
end
for _, entry in ipairs(call('ZRANGE', UNMET, 0, -1)) do
  local id, queue, other = string.match(entry, '^([^%z]+)%z([^%z]+)%z(.+)$')
  if queue and queue ~= ARGV[ARGS + 2] then
    local blob = call('HGET', JOBS, id)
    if blob then send(queue, {'unbind', other, id, sub(blob, 1, 8)}) end
  end
end

if watching then
  for _, id in ipairs(call('HKEYS', JOBS)) do
    local job = load(id)
    if job.state == ACTIVE then tell(id, job.name, 'cancelled', 'cancelled') end
    tell(id, job.name, 'removed', job.state == ACTIVE and 'cancelled' or NAMES[job.state])
  end
end
if many > 0 then
  call('RENAME', JOBS, KEYS[FIXED + 1])
  call('SADD', KEYS[FIXED + 2], name)
end
-- Numbers go on from here, so that no token or place is ever given twice; what is still to be sent stays.
local sent = call('HGET', META, 'sent')
call('UNLINK', META, COUNT, ST, W, Z, ASIDES, DUE, PARKS, HEADS, OUT, GROUPS, UNMET, TTL, LEASE, FINISHED, DEAD, LETTERS, AGAIN, UNIQ, UNIQTTL, DEPS, HIST, PROG, DROPS)
if call('LLEN', OUTBOX) > 0 and sent then call('HSET', META, 'sent', sent) end
call('PEXPIRE', INBOX, 86400000)
call('DEL', LOG)
changed = {}
return answer(many)
