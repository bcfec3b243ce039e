-- Pack `ids` for the stream of changes into `packed` (MessagePack).
--
-- Those of equal length are packed as their common beginning and end, the length of what is between, and the parts
-- between, joined, which takes less time. The ids of a large batch are usually UUIDs of one source, which begin alike.
do
  local count, size = #ids, #ids[1]
  for i = 2, count do
    if #ids[i] ~= size then
      size = 256
      break
    end
  end
  if size > 255 or count == 1 then
    packed = encode(ids)
  elseif count < 250 or ids[1] == ids[count] then
    -- What `encode` would make of {'', '', size, joined ids}, but made at once: Lua hashes every string.
    packed = pack('>c4Bc1I4', '\148\160\160\204', size, '\219', count * size) .. table.concat(ids)
  else
    local one, other, from, to = ids[1], ids[count], 1, size
    while string.byte(one, from) == string.byte(other, from) do from = from + 1 end
    while string.byte(one, to) == string.byte(other, to) do to = to - 1 end
    local heading, tail, parts = sub(one, 1, from - 1), sub(one, to + 1), {}
    for i = 1, count do parts[i] = sub(ids[i], from, to) end
    -- Comparing them as a whole takes less time than one by one.
    if heading .. table.concat(parts, tail .. heading) .. tail == table.concat(ids) then
      packed = encode({heading, tail, to - from + 1, table.concat(parts)})
    else
      packed = encode(ids)
    end
  end
end
