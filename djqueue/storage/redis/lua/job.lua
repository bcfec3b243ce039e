-- One job as it is stored.
--
-- jobs[id] = number (8 bytes) .. enqueued at (8) .. flag (1) .. length (2) .. name .. length (4) ..
--            options (MessagePack) .. payload. The flag is 'p' for a plain job, whose end concerns no other key; 'q' for
--            one that is plain but for its place among the waiting jobs (priority, lifo); 'x' for all others. See
--            update.lua for what may change.
-- st[id]   = state code .. number (8) .. for ended jobs: finished at (8) .. expires at (8) .. body (MessagePack).
--
-- The body lists attempts, failures, stalls, worker, started at, run at, reason, the error's type, message, traceback,
-- cancel requested, automatic retries. Two more values follow if needed: the number of items that the attempt has sent
-- (0 if those in the key are of an earlier attempt; false if there is no key), and, if the queue bounds the age of
-- results, when the result of a completed job expires (negative while the record is held).
--
-- An active job has the code 'A' if its end concerns other keys. A job that waits as it was enqueued has no entry in st.
-- The number is the position of a waiting job, and the token of the last claim of any other. The one in jobs[id] is the
-- job's incarnation: it differs between the jobs that have had one id.
--! include layout

local ATTEMPTS, FAILURES, STALLS, WORKER, STARTED, RUN_AT, REASON = 1, 2, 3, 4, 5, 6, 7
local ERROR_TYPE, ERROR_MESSAGE, ERROR_TRACEBACK, CANCEL, RETRIES = 8, 9, 10, 11, 12
local ITEMS, READABLE = 13, 14
local NO_OPTIONS = {}

local function parse(id, blob, st)
  local first, last = options_range(blob)
  local job = {
    id = id, inc = sub(blob, 1, 8), created = unpack_number('>I8', blob, 9),
    name = name_of(blob), flag = sub(blob, 17, 17),
    o = decode(sub(blob, first, last)), size = #blob - last,
  }
  if not st then
    job.state, job.mark = WAITING, job.inc
    job.b = {0, 0, 0, '', 0, 0, '', '', '', '', 0, 0}
  else
    job.state, job.mark = sub(st, 1, 1), sub(st, 2, 9)
    if job.state == LINKED_ACTIVE then job.state = ACTIVE end
    if ENDED[job.state] then
      job.finished, job.expires = unpack_number('>I8I8', st, 10)
      job.b = decode(sub(st, 26))
    else
      job.b = decode(sub(st, 10))
    end
  end
  return job
end

local function load(id)
  local blob = call('HGET', JOBS, id)
  return blob and parse(id, blob, call('HGET', ST, id))
end

local function save(job)
  local ended = ENDED[job.state] and pack('>I8I8', job.finished, job.expires) or ''
  local code = job.state
  if code == ACTIVE and (job.flag == 'x' or job.b[ITEMS]) then code = LINKED_ACTIVE end
  call('HSET', ST, job.id, code .. job.mark .. ended .. encode(job.b))
  note(job.id, job.state)
end

-- Prepare the next attempt, whose items begin anew.
local function restart(job)
  if job.b[ITEMS] then job.b[ITEMS] = 0 end
end

-- Slots of the queue's concurrency that a job takes.
local function weight_of(job)
  return job.o.weight or 1
end

-- Milliseconds for which the result of a job can be read; nil: forever.
local function result_ttl_of(job)
  local ttl = job.o.result_ttl
  if ttl == nil then return RESULT_TTL end
  return tonumber(ttl)
end

-- What happens to a job when a dependency does not complete.
local function dependency_rule_of(options)
  return options.on_dependency_failure or DEFAULT.ON_DEPENDENCY_FAILURE
end

-- Return whether an entry of st is of the claim with this token.
local function holds(st, token)
  if not st or sub(st, 2, 9) ~= token then return false end
  local code = sub(st, 1, 1)
  return code == ACTIVE or code == LINKED_ACTIVE
end

-- Return whether an ended job has expired, although no sweep has removed it yet.
local function is_over(job)
  return ENDED[job.state] and job.expires ~= 0 and job.expires <= now
end
