-- Cancel pending jobs, and ask active ones to stop.
--
-- ARGV: the reason, the configuration of groups; then the ids.
-- Returns for each 'cancelled', 'requested', 'not_found' or the state of an ended job.
--! include base job ready completion

local reason = ARGV[ARGS]
configure_groups(ARGV[ARGS + 1])
local replies = {}
for i = ARGS + 2, #ARGV do
  local job = load(ARGV[i])
  local reply
  if not job or is_over(job) then
    reply = 'not_found'
  elseif job.state == ACTIVE then
    job.b[CANCEL] = 1
    save(job) --@ nothing changes: it is asked to stop
    emit_event(job.id, job.name, 'cancel_requested', 'active')
    reply = 'requested'
  elseif ENDED[job.state] then
    reply = NAMES[job.state]
  else
    leave_pending(job)
    cancel(job, reason)
    incident(job, 'cancelled')
    reply = 'cancelled'
  end
  replies[#replies + 1] = reply
end
return answer(replies)
