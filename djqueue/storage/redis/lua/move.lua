-- Move pending jobs to another time.
--
-- ARGV: the event, the time ('' for now), the configuration of groups; then the ids.
-- Returns for each 1 or 0.
--! include base job ready completion removal

local event, run_at = ARGV[ARGS], tonumber(ARGV[ARGS + 1]) or now
configure_groups(ARGV[ARGS + 2])
local replies = {}
for i = ARGS + 3, #ARGV do
  local job = load(ARGV[i])
  local state = job and NAMES[job.state]
  local may = state == 'delayed' or event == 'rescheduled' and state == 'waiting'
  if may then move(job, run_at, event) end
  replies[#replies + 1] = may and 1 or 0
end
return answer(replies)
