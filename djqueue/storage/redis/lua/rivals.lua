-- What keeps jobs of another queue from coming to this one. Arguments: of each its id, its unique key, or '',
-- and whether it has failed (1): it takes nobody's place then.
-- Answers for each 'duplicate', 'unique_key_taken' or ''.
--! include base job ready completion

local replies = {}
for i = ARGS, #ARGV, 3 do
  local there, key, has_failed = load(ARGV[i]), ARGV[i + 1], ARGV[i + 2] == '1'
  local reply = ''
  if there and not is_over(there) and (has_failed or there.state ~= FAILED and there.state ~= CANCELLED) then
    reply = 'duplicate'
  elseif not has_failed and key ~= '' and owner_of(key) then
    reply = 'unique_key_taken'
  end
  replies[#replies + 1] = reply
end
unchanged = true
return answer(replies)
