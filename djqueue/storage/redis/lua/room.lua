-- Which jobs go when a queue is full, where its policy has some go.
--
-- drops    all scores 0: (0, or the priority) .. number .. id of jobs that were pending once and had not run
--! keys drops

-- rank: 'o' the oldest goes first, 'l' the oldest of those with the lowest priority.
local function drop_member(job, rank)
  return pack('>I4', rank == 'l' and FLIP + priority_of(job) or 0) .. job.inc .. job.id
end

local function droppable(entry)
  local job = load(sub(entry, 13))
  if not job or job.inc ~= sub(entry, 5, 12) or ENDED[job.state] or job.state == ACTIVE then return nil end
  return job.b[STARTED] == 0 and job or nil
end

-- The job that goes for one with this priority; nil: none may.
local function first_to_drop(priority)
  while true do
    local entry = call('ZRANGE', DROPS, 0, 0)[1]
    if not entry then return nil end
    local rank = unpack_number('>I4', entry)
    if rank > FLIP + priority then return nil end
    local job = droppable(entry)
    if job then return job, entry end
    call('ZREM', DROPS, entry)
  end
end

-- Jobs that have started, or are gone, leave their entries behind: some of them are looked for each time.
local function tidy(many)
  local at = tonumber(call('HGET', META, 'tidied') or 0)
  local found = call('ZRANGE', DROPS, at, at + many - 1)
  for _, entry in ipairs(found) do
    if droppable(entry) then at = at + 1 else call('ZREM', DROPS, entry) end
  end
  if #found < many then
    call('HDEL', META, 'tidied')
  else
    call('HSET', META, 'tidied', at)
  end
end
