-- How long the records, results and details of ended jobs are kept.
--
-- finished  ids by the time at which the record expires
-- about     of jobs with a subject: subject .. NUL .. enqueued at (8) .. number (8) .. id
--
-- If the queue bounds bytes, of ended jobs:
-- sizes     id: bytes of payload and error (4) .. of the result (4)
-- results   ids by the time at which the result expires
-- If it bounds the age of attempts or log lines:
-- details   'h' .. id (attempts) or 'l' .. id (log lines) by the time at which they expire
--! keys finished hist deps holds sizes results details about

-- A table, since a script may have only two hundred local names.
local keep = {
  attempts = 1000, -- of each job; set by scripts whose callers know it
}

-- Milliseconds for which the record of an ended job is kept; nil: forever.
function keep.kept_for(job)
  local ttl = result_ttl_of(job)
  return ttl and math.max(ttl, job.o.retention or 0)
end

-- Add ('ZADD') or remove ('ZREM') a job's entry under its subject.
function keep.index_subject(command, job)
  local subject = job.o.subject
  if not subject then return end
  local entry = subject .. NUL .. pack('>I8', job.created) .. job.inc .. job.id
  if command == 'ZADD' then call('ZADD', ABOUT, 0, entry) else call('ZREM', ABOUT, entry) end
end

-- Return whether the record of a job is held for live dependents. It does not expire then, and its score in `finished`
-- is the time to check whether they still live, in case the message about that was lost.
function keep.is_held(job)
  if job.expires ~= 0 or job.state == FAILED then return false end
  if keep.kept_for(job) then return true end
  local at = call('ZSCORE', FINISHED, job.id)
  return at and tonumber(at) < FOREVER
end

-- Count held records by outcome. Between `batch_counts` and `write_counts` a script sums up the changes.
function keep.batch_counts()
  keep.sums = {c = 0, x = 0}
end

function keep.write_counts()
  for state, number in pairs(keep.sums) do add('h' .. state, number) end
  keep.sums = nil
end

function keep.count(job, number)
  if keep.sums then
    keep.sums[job.state] = keep.sums[job.state] + number
  else
    add('h' .. job.state, number)
  end
end

-- Return a bound of the queue: maximum age of records ('c', 'x'), results ('r'), attempts ('h') or log lines ('l') in
-- milliseconds, or whether it counts bytes ('bytes').
function keep.bound(name)
  if not keep.bounds then
    local found = call('HMGET', META, 'age:c', 'age:x', 'age:r', 'age:h', 'age:l', 'bytes')
    keep.bounds = {}
    for at, field in ipairs({'c', 'x', 'r', 'h', 'l', 'bytes'}) do keep.bounds[field] = tonumber(found[at] or nil) end
  end
  return keep.bounds[name]
end

-- Milliseconds for which a result can be read in this queue; nil: forever.
function keep.readable_for(job)
  local readable, limit = result_ttl_of(job), keep.bound('r')
  if limit then return readable and math.min(readable, limit) or limit end
  return readable
end

-- Note when the details of an ended job expire, and how large they are. result: its size; nil: there is none.
function keep.note_details(job, result)
  local b = job.b
  if keep.bound('bytes') then
    local size = job.size + #b[ERROR_TYPE] + #b[ERROR_MESSAGE] + #b[ERROR_TRACEBACK]
    call('HSET', SIZES, job.id, pack('>I4I4', size, result or 0))
  end
  if keep.bound('h') and call('HEXISTS', HIST, job.id) == 1 then
    call('ZADD', DETAILS, job.finished + keep.bound('h'), 'h' .. job.id)
  end
  if keep.bound('l') then call('ZADD', DETAILS, job.finished + keep.bound('l'), 'l' .. job.id) end
  local readable_for = job.state == COMPLETED and keep.bound('r') and keep.readable_for(job)
  if readable_for then
    b[ITEMS], b[READABLE] = b[ITEMS] or false, job.finished + readable_for
  end
end

-- Count bytes by outcome, and those of results also on their own, but not those of held records.
function keep.count_bytes(job, sign)
  local kept = call('HGET', SIZES, job.id)
  if not kept then return end
  local size, result = unpack_number('>I4I4', kept)
  add('B' .. job.state, sign * size)
  add('Br', sign * result)
  if sign < 0 then
    call('ZREM', RESULTS, job.id)
  elseif result > 0 then
    call('ZADD', RESULTS, job.finished + (keep.readable_for(job) or FOREVER), job.id)
  end
end

-- Remove the notes on an ended job.
function keep.forget(job, is_held)
  if not is_held then keep.count_bytes(job, -1) end
  call('HDEL', SIZES, job.id)
  call('ZREM', DETAILS, 'h' .. job.id, 'l' .. job.id)
end

function keep.hold(job)
  job.expires = 0
  local readable_for = job.b[READABLE]
  if readable_for then job.b[READABLE] = -math.abs(readable_for) end
  keep.count(job, 1)
  call('ZADD', FINISHED, now + DAY, job.id)
end

function keep.expire_in(job, kept)
  local limit = job.state ~= FAILED and keep.bound(job.state)
  if limit then kept = kept and math.min(kept, limit) or limit end
  job.expires = kept and job.finished + kept or 0
  local readable_for = job.b[READABLE]
  if readable_for then job.b[READABLE] = math.abs(readable_for) end
  call('ZADD', FINISHED, kept and job.expires or FOREVER + job.finished, job.id)
  keep.count_bytes(job, 1)
end

local function set_expiry(job, kept, result)
  keep.note_details(job, result)
  job.has_dependents = has_entries(DEPS, job.id)
  if job.has_dependents and job.state ~= FAILED then
    keep.hold(job)
  else
    keep.expire_in(job, kept)
  end
end

-- Let a record that is no longer held expire.
function keep.release_record(id, result_key)
  if has_entries(HOLDS, id) then return end
  local job = load(id)
  if not job or not keep.is_held(job) then return end
  keep.count(job, -1)
  keep.expire_in(job, keep.kept_for(job))
  save(job) --@ nothing changes but how long it is kept
  local readable_for = job.b[READABLE] and job.b[READABLE] - job.finished or keep.readable_for(job)
  if readable_for then
    local left = job.finished + readable_for - now
    if left > 0 then call('PEXPIRE', result_key, left) else call('DEL', result_key) end
  end
end
