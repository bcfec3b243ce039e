-- One job as it is kept.
--
-- jobs[id] = number (8 bytes) .. created at (8) .. 'p' or 'x' (1) .. length (2) .. name .. length (4) ..
--            options (MessagePack) .. payload: see update for what may change. 'p': its end concerns no other key.
-- st[id]   = letter of its state .. number (8) .. for ended ones: finished at (8) .. expires at (8) ..
--            body (MessagePack): attempts, failures, stalls, worker, started at, run at, reason, the
--            error's type, message, traceback, cancel requested, retries by itself; and, only if there is
--            a key with items, how many its run has sent: 0 if they are those of an earlier run; and, only if
--            the queue keeps results for a time, that of the end of what a completed job returned and sent:
--            below zero while the result is held, whatever its time. Before that, items without a key are false.
-- The letter of an active job is 'A' if its end concerns other keys.
-- A job that waits as it was enqueued has no entry in st. The number is that of its place while it
-- waits, the token of its claim since it started; the one in jobs[id] names this job among those that
-- have had its id.

local WAITING, ASIDE, PARKED, DELAYED, BLOCKED = 'w', 's', 'g', 'd', 'b'
local ACTIVE, COMPLETED, FAILED, CANCELLED = 'a', 'c', 'f', 'x'
local NAMES = {
  w = 'waiting', s = 'waiting', g = 'waiting', d = 'delayed', b = 'blocked', a = 'active',
  c = 'completed', f = 'failed', x = 'cancelled',
}
local ENDED = {c = true, f = true, x = true}
local ATTEMPTS, FAILURES, STALLS, WORKER, STARTED, RUN_AT, REASON = 1, 2, 3, 4, 5, 6, 7
local ERROR_TYPE, ERROR_MESSAGE, ERROR_TRACEBACK, CANCEL, RETRIES = 8, 9, 10, 11, 12
local ITEMS, READABLE = 13, 14
local NO_OPTIONS = {}

local function name_of(blob)
  return sub(blob, 20, 19 + unpack_number('>I2', blob, 18))
end

local function parse(id, blob, st)
  local length = unpack_number('>I2', blob, 18)
  local size = unpack_number('>I4', blob, 20 + length)
  local job = {
    id = id, inc = sub(blob, 1, 8), created = unpack_number('>I8', blob, 9),
    name = sub(blob, 20, 19 + length), plain = sub(blob, 17, 17) == 'p',
    o = decode(sub(blob, 24 + length, 23 + length + size)), size = #blob - 23 - length - size,
  }
  if not st then
    job.state, job.mark = WAITING, job.inc
    job.b = {0, 0, 0, '', 0, 0, '', '', '', '', 0, 0}
  else
    job.state, job.mark = sub(st, 1, 1), sub(st, 2, 9)
    if job.state == 'A' then job.state = ACTIVE end
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
  local letter = job.state
  if letter == ACTIVE and (not job.plain or job.b[ITEMS]) then letter = 'A' end
  call('HSET', ST, job.id, letter .. job.mark .. ended .. encode(job.b))
  note(job.id, job.state)
end

-- There is to be another run, whose items begin anew.
local function restart(job)
  if job.b[ITEMS] then job.b[ITEMS] = 0 end
end

-- Slots of the queue's concurrency that a job takes.
local function weight_of(job)
  return job.o.weight or 1
end

-- Whether an entry of st is of the claim with this token.
local function holds(st, token)
  if not st or sub(st, 2, 9) ~= token then return false end
  local letter = byte(st)
  return letter == 97 or letter == 65
end

-- A finished job whose time is over is as good as gone, though nobody has swept it away yet.
local function is_over(job)
  return ENDED[job.state] and job.expires ~= 0 and job.expires <= now
end
