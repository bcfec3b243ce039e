-- Find what keeps jobs of another queue from moving to this one.
--
-- ARGV: of each job its id, its unique key or '', and '1' if it has failed: it needs no key then.
-- Returns for each 'duplicate', 'unique_key_taken' or ''.
--! include base job ready completion

local replies = {}
for i = ARGS, #ARGV, 3 do
  local existing, key, has_failed = load(ARGV[i]), ARGV[i + 1], ARGV[i + 2] == '1'
  local reply = ''
  if existing and not is_over(existing) and (has_failed or existing.state ~= FAILED and existing.state ~= CANCELLED) then
    reply = 'duplicate'
  elseif not has_failed and key ~= '' and owner_of(key) then
    reply = 'unique_key_taken'
  end
  replies[#replies + 1] = reply
end
unchanged = true
return answer(replies)
