-- The jobs that are dropped when a queue is full, if its policy drops any.
--
-- drops  sorted set with equal scores: (0, or the priority) .. number .. id of jobs that have not run yet
--! keys drops

-- rank: 'o' drops the oldest job first, 'l' the oldest one of the lowest priority.
local function drop_member(job, rank)
  return pack('>I4', rank == 'l' and PRIORITY_BASE + priority_of(job) or 0) .. job.inc .. job.id
end

local function droppable(entry)
  local job = load(sub(entry, 13))
  if not job or job.inc ~= sub(entry, 5, 12) or ENDED[job.state] or job.state == ACTIVE then return nil end
  return job.b[STARTED] == 0 and job or nil
end

-- Return the job to drop for one with this priority, and its entry; nil: there is none.
local function first_to_drop(priority)
  while true do
    local entry = call('ZRANGE', DROPS, 0, 0)[1]
    if not entry then return nil end
    local rank = unpack_number('>I4', entry)
    if rank > PRIORITY_BASE + priority then return nil end
    local job = droppable(entry)
    if job then return job, entry end
    call('ZREM', DROPS, entry)
  end
end

-- Remove entries of jobs that have started or are gone: each call looks at some of them.
local function clean_drops(limit)
  local at = tonumber(call('HGET', META, 'tidied') or 0)
  local found = call('ZRANGE', DROPS, at, at + limit - 1)
  for _, entry in ipairs(found) do
    if droppable(entry) then at = at + 1 else call('ZREM', DROPS, entry) end
  end
  if #found < limit then
    call('HDEL', META, 'tidied')
  else
    call('HSET', META, 'tidied', at)
  end
end
