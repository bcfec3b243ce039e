-- Dependents of a job, and the records that they need.
--
-- deps      id .. NUL .. number .. its dependent
-- needs     ids of live jobs that depend on others
-- holds     id .. NUL .. a live job that may read its record
--! keys deps holds needs

-- A table, since a script may have only two hundred local names.
local dependents = {
  IDS_PER_MESSAGE = 100,
  NOTIFIED_AT_ONCE = 500,
}

-- Pass up to NOTIFIED_AT_ONCE dependents of a job to `notify`, and remove them; it returns false to skip one.
-- before: only dependents with at most this number. Returns whether some may be left.
function dependents.each(id, before, notify)
  local kept, notified = 0, 0
  while notified < dependents.NOTIFIED_AT_ONCE do
    local found = call('ZRANGEBYLEX', DEPS, '[' .. id .. NUL, '(' .. id .. AFTER, 'LIMIT', kept, dependents.NOTIFIED_AT_ONCE)
    if #found == 0 then return false end
    for _, entry in ipairs(found) do
      local dependent = sub(entry, #id + 10)
      if notified < dependents.NOTIFIED_AT_ONCE then
        local is_later = before and unpack_number('>I8', entry, #id + 2) > before
        if is_later or notify(decode(dependent), dependent) == false then
          kept = kept + 1
        else
          call('ZREM', DEPS, entry)
          notified = notified + 1
        end
      end
    end
    if #found < dependents.NOTIFIED_AT_ONCE and notified < dependents.NOTIFIED_AT_ONCE then return false end
  end
  return true
end

-- Send a job's end to its dependents through the outbox; if there are too many, the rest with another message.
-- before: dependents with a higher number do not mean this end.
-- holds: they hold its record from now on. An entry without a name holds it as long as some are left to be notified.
function dependents.notify(id, state, before, holds)
  local function notify(who, dependent)
    if state == 'failed' and who[4] == 'wait' then return false end
    if holds then call('ZADD', HOLDS, 0, id .. NUL .. dependent) end
    send(who[1], {'ended', id, state, who[2], who[3]})
  end
  if not dependents.each(id, before, notify) then return end
  if holds then call('ZADD', HOLDS, 0, id .. NUL) end
  send('', {'fan', id, state, before or false, holds or false})
end

function dependents.note_end(job, state)
  if job.has_dependents ~= false then dependents.notify(job.id, state, nil, job.has_dependents and job.state ~= FAILED) end
end

-- Send one message to each queue of several jobs, (queue, id) each.
function dependents.send_grouped(keys, kind, ...)
  local found = {}
  for _, key in ipairs(keys) do
    local queue = key[1]
    local ids = found[queue] or {}
    found[queue] = ids
    ids[#ids + 1] = key[2]
    if #ids == dependents.IDS_PER_MESSAGE then
      send(queue, {kind, ids, ...})
      found[queue] = nil
    end
  end
  for queue, ids in pairs(found) do send(queue, {kind, ids, ...}) end
end

-- Let go of the records that a job needed.
function dependents.release(job)
  if job.o.depends_on and call('SREM', NEEDS, job.id) == 1 then
    dependents.send_grouped(job.o.depends_on, 'unbind', job.id, job.inc, dependency_rule_of(job.o))
  end
end
