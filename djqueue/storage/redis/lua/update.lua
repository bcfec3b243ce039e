-- Change the priority or the payload of pending jobs.
--
-- ARGV: the priority ('' leaves it), '1' if there is a payload, the payload, the configuration of groups; then the ids.
-- Returns for each 1 or 0.
--! include base job ready room

local priority, payload = tonumber(ARGV[ARGS]), ARGV[ARGS + 1] == '1' and ARGV[ARGS + 2]
configure_groups(ARGV[ARGS + 3])
local NO_OPTIONS_PACKED = string.char(128)

local function prioritize(job)
  local was_ready = unready(job)
  local had_rank = call('ZREM', DROPS, drop_member(job, 'l')) == 1
  job.o.priority = priority ~= 0 and priority or nil
  if had_rank then call('ZADD', DROPS, 0, drop_member(job, 'l')) end
  if was_ready then
    job.b[RUN_AT] = now -- it goes behind the others, as a new job does
    make_ready(job)
  end
  save(job) --@ nothing changes: it is still pending
  return next(job.o) and encode(job.o) or NO_OPTIONS_PACKED
end

local function update(job)
  local blob = call('HGET', JOBS, job.id)
  local at = 20 + #job.name
  local size = unpack_number('>I4', blob, at)
  local options = sub(blob, at + 4, at + 3 + size)
  local content = payload or sub(blob, at + 4 + size)
  if priority and priority ~= priority_of(job) then
    if job.flag == 'p' then job.flag = 'q' end
    options = prioritize(job)
  else
    note(job.id, 'u')
  end
  call('HSET', JOBS, job.id, sub(blob, 1, 16) .. job.flag .. sub(blob, 18, at - 1) .. pack('>I4', #options) .. options .. content)
end

local replies = {}
for i = ARGS + 4, #ARGV do
  local job = load(ARGV[i])
  local may = job and not ENDED[job.state] and job.state ~= ACTIVE
  if may then update(job) end
  replies[#replies + 1] = may and 1 or 0
end
return answer(replies)
