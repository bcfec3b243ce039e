-- Progress and log lines of runs whose tokens hold. Arguments: how many lines a job keeps; then of each its
-- id, token, progress ('' leaves it), number of lines, lines. Keys: of each, its log lines.
--! include base job
--! keys prog

local most = tonumber(ARGV[ARGS])
local replies, at, key = {}, ARGS + 1, FIXED
while at <= #ARGV do
  local id, token, progress, many = ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  key = key + 1
  local st = call('HGET', ST, id)
  if holds(st, token) then
    if progress ~= '' then
      call('HSET', PROG, id, progress)
      tell(id, name_of(call('HGET', JOBS, id)), 'progress', 'active')
    end
    for line = at + 4, at + 3 + many do
      call('RPUSH', KEYS[key], ARGV[line])
    end
    if many > 0 then call('LTRIM', KEYS[key], -most, -1) end
    note(id, 'u')
    replies[#replies + 1] = 1
  else
    replies[#replies + 1] = 0
  end
  at = at + 4 + many
end
return answer(replies)
