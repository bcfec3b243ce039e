-- Remove a queue.
--
-- KEYS: where the jobs are kept until the keys of each are deleted, too; the set of such names; buckets of metrics.
-- ARGV: '1' to remove active jobs, too; the name for what is left to delete; the queue.
-- Returns the number of jobs, or -1 if there are active ones, and the tokens of the active ones.
--! include base job ready completion
--! keys inbox drops

local force, name = ARGV[ARGS] == '1', ARGV[ARGS + 1]
if call('ZCARD', LEASE) > 0 and not force then
  return answer({-1, {}})
end
local count, tokens = call('HLEN', JOBS), {}
for _, id in ipairs(call('ZRANGE', LEASE, 0, -1)) do
  tokens[#tokens + 1] = sub(call('HGET', ST, id) or '', 2, 9)
end

-- Notify the dependents and the dependencies of these jobs in other queues.
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
  if job then dependents.send_grouped(others, 'unbind', id, job.inc, dependency_rule_of(job.o)) end
end

if watching then
  for _, id in ipairs(call('HKEYS', JOBS)) do
    local job = load(id)
    if job.state == ACTIVE then emit_event(id, job.name, 'cancelled', 'cancelled') end
    emit_event(id, job.name, 'removed', job.state == ACTIVE and 'cancelled' or NAMES[job.state])
  end
end
if count > 0 then
  call('RENAME', JOBS, KEYS[FIXED + 1])
  call('SADD', KEYS[FIXED + 2], name)
end
-- Numbers go on ascending, so that no token or position is used twice. Messages that were not sent yet stay.
local sent = call('HGET', META, 'sent')
call('UNLINK', META, ST, W, Z, UNHANDLED, DUE, GROUP_WAITING, GROUP_READY, GROUP_ACTIVE, GROUPS, RATES, UNMET, TTL, LEASE, FINISHED, DEAD, DEAD_LETTERS, AUTO_RETRIES, UNIQ, UNIQTTL, DEPS, HOLDS, NEEDS, HIST, PROG, DROPS, SIZES, RESULTS, DETAILS, ABOUT)
if call('LLEN', OUTBOX) > 0 and sent then call('HSET', META, 'sent', sent) end
for i = FIXED + 3, #KEYS do call('UNLINK', KEYS[i]) end
call('PEXPIRE', INBOX, DAY)
call('DEL', LOG)
changed = {}
unchanged = true -- the queue is taken off the list
call('UNLINK', VERSION)
return answer({count, tokens})
