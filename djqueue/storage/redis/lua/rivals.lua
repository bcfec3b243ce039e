-- What keeps jobs of another queue from coming to this one. Arguments: of each its id and its unique key, or ''.
-- Answers for each 'duplicate', 'unique_key_taken' or ''.
--! include base job places ends

local replies = {}
for i = ARGS, #ARGV, 2 do
  local there, key = load(ARGV[i]), ARGV[i + 1]
  local reply = ''
  if there and not is_over(there) and there.state ~= FAILED and there.state ~= CANCELLED then
    reply = 'duplicate'
  elseif key ~= '' and owner_of(key) then
    reply = 'unique_key_taken'
  end
  replies[#replies + 1] = reply
end
return answer(replies)
