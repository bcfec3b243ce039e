-- Write progress and log lines of attempts whose tokens hold.
--
-- KEYS: of each job, its log lines.
-- ARGV: maximum number of log lines of a job; then of each its id, token, progress ('' leaves it), number of lines, lines.
-- Returns for each 1 or 0.
--! include base job
--! keys prog

local limit = tonumber(ARGV[ARGS])
local replies, at, key = {}, ARGS + 1, FIXED
while at <= #ARGV do
  local id, token, progress, count = ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  key = key + 1
  local st = call('HGET', ST, id)
  if holds(st, token) then
    if progress ~= '' then
      call('HSET', PROG, id, progress)
      emit_event(id, name_of(call('HGET', JOBS, id)), 'progress', 'active')
    end
    for line = at + 4, at + 3 + count do
      call('RPUSH', KEYS[key], ARGV[line])
    end
    if count > 0 then call('LTRIM', KEYS[key], -limit, -1) end
    note(id, 'u')
    replies[#replies + 1] = 1
  else
    replies[#replies + 1] = 0
  end
  at = at + 4 + count
end
return answer(replies)
