-- Dead letters to waiting, or behind their dependencies. Arguments: '0', 'd' (not really), 'w' (what they depend on has
-- completed) or 'b' (it has not); what the settings say of groups; then the ids.
-- Answers for each a word; for one that failed for its dependencies, whose states are to be looked at first, (queue, id) of
-- those that had not completed, one after the other.
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
    local kept = call('HGET', LETTERS, id)
    local letter = kept and decode(kept) or {'', 0, 0, 0, 0}
    local lacks = letter[9]
    if letter[1] == 'enqueue_rejected' then
      reply = 'rejected'
    elseif job.o.unique_key and (keys_seen[job.o.unique_key] or owner_of(job.o.unique_key)) then
      reply = 'unique_key_taken'
    elseif is_dry or lacks and not looked then
      seen[id] = true
      if job.o.unique_key then keys_seen[job.o.unique_key] = true end
      reply = 'retried'
      if lacks then
        reply = {}
        for _, key in ipairs(lacks) do
          reply[#reply + 1], reply[#reply + 2] = key[1], key[2]
        end
      end
    else
      revive(job, 0, lacks and (mode == 'b' and lacks or {}))
      reply = job.state == BLOCKED and 'blocked_again' or 'retried'
    end
  end
  replies[#replies + 1] = reply
end
return answer(replies)
