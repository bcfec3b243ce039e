-- Retry dead letters.
--
-- ARGV: '0', 'd' (dry run), 'w' (the dependencies have completed) or 'b' (they have not); the configuration of groups;
--   then the ids.
-- Returns for each a result; for a job that failed because of dependencies, whose states have to be checked first, queue
--   and id in turn of those that had not completed.
--! include base job ready completion removal

local mode = ARGV[ARGS]
local is_dry, looked = mode == 'd', mode == 'w' or mode == 'b'
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
    local kept = call('HGET', DEAD_LETTERS, id)
    local dead_letter = kept and decode(kept) or {'', 0, 0, 0, 0}
    local unmet = dead_letter[9]
    if dead_letter[1] == REASONS.ENQUEUE_REJECTED then
      reply = 'rejected'
    elseif job.o.unique_key and (keys_seen[job.o.unique_key] or owner_of(job.o.unique_key)) then
      reply = 'unique_key_taken'
    elseif is_dry or unmet and not looked then
      seen[id] = true
      if job.o.unique_key then keys_seen[job.o.unique_key] = true end
      reply = 'retried'
      if unmet then
        reply = {}
        for _, key in ipairs(unmet) do
          reply[#reply + 1], reply[#reply + 2] = key[1], key[2]
        end
      end
    else
      revive(job, 0, unmet and (mode == 'b' and unmet or {}))
      reply = job.state == BLOCKED and 'blocked_again' or 'retried'
    end
  end
  replies[#replies + 1] = reply
end
return answer(replies)
