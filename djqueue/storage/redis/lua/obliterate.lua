-- Forget the queue. Arguments: whether also with active jobs ('1'); a name for what is left to be deleted.
-- Keys: where the jobs are put until what belongs to each is deleted, too; the set of such names; buckets of
-- metrics.
-- Answers how many jobs there were, or -1 if active ones forbade it; and the tokens of the active ones.
--! include base job ready completion
--! keys inbox drops

local force, name = ARGV[ARGS] == '1', ARGV[ARGS + 1]
if call('ZCARD', LEASE) > 0 and not force then
  return answer({-1, {}})
end
local many, tokens = call('HLEN', JOBS), {}
for _, id in ipairs(call('ZRANGE', LEASE, 0, -1)) do
  tokens[#tokens + 1] = sub(call('HGET', ST, id) or '', 2, 9)
end

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
for _, id in ipairs(call('SMEMBERS', NEEDS)) do
  local job, others = load(id), {}
  for _, key in ipairs(job and job.o.depends_on or {}) do
    if key[1] ~= ARGV[ARGS + 2] then others[#others + 1] = key end
  end
  if job then keep.tell(others, 'unbind', id, job.inc, job.o.on_dependency_failure or 'fail') end
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
call('UNLINK', META, COUNT, ST, W, Z, ASIDES, DUE, PARKS, HEADS, OUT, GROUPS, RATES, UNMET, TTL, LEASE, FINISHED, DEAD, LETTERS, AGAIN, UNIQ, UNIQTTL, DEPS, HOLDS, NEEDS, HIST, PROG, DROPS, SIZES, RESULTS, DETAILS, ABOUT)
if call('LLEN', OUTBOX) > 0 and sent then call('HSET', META, 'sent', sent) end
for i = FIXED + 3, #KEYS do call('UNLINK', KEYS[i]) end
call('PEXPIRE', INBOX, 86400000)
call('DEL', LOG)
changed = {}
unchanged = true -- its name goes from the list of queues
call('UNLINK', VERSION)
return answer({many, tokens})
