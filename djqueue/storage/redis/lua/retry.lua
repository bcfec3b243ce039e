-- Dead letters to waiting. Arguments: '1' by themselves, '0' by hand, 'd' not really; what the settings say of groups; then the ids.
--! include base job places ends

local by_itself, is_dry = ARGV[ARGS] == '1', ARGV[ARGS] == 'd'
local seen, keys_seen = {}, {}
configure_groups(ARGV[ARGS + 1])
local replies = {}
for i = ARGS + 2, #ARGV do
  local id = ARGV[i]
  local job = load(id)
  local reply
  if not job then
    reply = 'not_found'
  elseif job.state ~= FAILED or seen[id] then
    reply = 'not_failed'
  else
    local kept = call('HGET', LETTERS, id)
    local letter = kept and decode(kept) or {'', 0, 0, 0, 0}
    if by_itself and not (letter[5] > 0 and letter[5] <= now) then
      reply = 'not_failed'
    elseif letter[1] == 'enqueue_rejected' then
      reply = 'rejected'
    elseif job.o.unique_key and (keys_seen[job.o.unique_key] or owner_of(job.o.unique_key)) then
      reply = 'unique_key_taken'
    elseif is_dry then
      seen[id] = true
      if job.o.unique_key then keys_seen[job.o.unique_key] = true end
      reply = 'retried'
    else
      revive(job, by_itself and letter[4] + 1 or 0)
      reply = 'retried'
    end
  end
  replies[#replies + 1] = reply
end
return answer(replies)
