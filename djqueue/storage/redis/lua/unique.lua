-- Unique keys, and jobs that wait for the end of an active job with their key.
--
-- uniq      key: free at (8) .. number (8) .. id; for NUL .. key see wait_behind
-- uniqttl   keys by the time at which they are free
--! keys uniq uniqttl

-- Return the id of the job that holds a unique key, or nil.
local function owner_of(key)
  local held = call('HGET', UNIQ, key)
  if not held then return nil end
  local free_at = unpack_number('>I8', held)
  if free_at ~= 0 and free_at <= now then
    call('HDEL', UNIQ, key)
    call('ZREM', UNIQTTL, key)
    return nil
  end
  return sub(held, 17)
end

local function take_key(job)
  local key, lives = job.o.unique_key, job.o.unique_ttl
  if key then
    local free_at = lives and job.created + lives or 0
    call('HSET', UNIQ, key, pack('>I8', free_at) .. job.inc .. job.id)
    if lives then
      call('ZADD', UNIQTTL, free_at, key)
    else
      call('ZREM', UNIQTTL, key)
    end
  end
end

-- Let a job wait for the end of the active job with its key. Stored: the numbers of both (8, 8) .. the waiting job's id.
local function wait_behind(job, owner)
  call('HSET', UNIQ, NUL .. job.o.unique_key, owner.inc .. job.inc .. job.id)
  call('ZADD', UNMET, 0, job.id .. NUL .. NUL)
  job.unmet = true
end

local function follower(key)
  local next = call('HGET', UNIQ, NUL .. key)
  return next and load(sub(next, 17))
end

local function is_followed(job)
  local key = job.o.unique_key
  local next = key and call('HGET', UNIQ, NUL .. key)
  return next and sub(next, 1, 8) == job.inc
end

local function release_key(job)
  local key = job.o.unique_key
  if not key then return end
  local found = call('HMGET', UNIQ, key, NUL .. key)
  local held, next = found[1], found[2]
  if held and sub(held, 9, 16) == job.inc and sub(held, 17) == job.id then
    call('HDEL', UNIQ, key)
    call('ZREM', UNIQTTL, key)
  end
  if next and sub(next, 9, 16) == job.inc then
    call('HDEL', UNIQ, NUL .. key)
  elseif next and sub(next, 1, 8) == job.inc then
    call('HDEL', UNIQ, NUL .. key)
    local successor = load(sub(next, 17))
    if successor and successor.state == BLOCKED then
      if not owner_of(key) then take_key(successor) end
      dependency_met(successor, '', '')
    end
  end
end
