-- Pack `ids` for the stream of changes into `packed` (MessagePack).
--
-- Those of equal length are packed as their common beginning and end, the length of what is between, and the parts
-- between, joined, which takes less time. The ids of a large batch are usually UUIDs of one source, which begin alike.
do
  local count, size = #ids, #ids[1]
  local joined = count > 1 and table.concat(ids) or ''
  local is_even = #joined == count * size
  for i = 2, is_even and count or 0 do
    if #ids[i] ~= size then is_even = false end
  end
  if not is_even then
    packed = encode(ids)
  elseif size < 256 and #joined < 65536 and (count < 250 or ids[1] == ids[count]) then
    -- In the encoding of a list of two empty texts, a number, and a text, which `encode` takes longer to write.
    packed = pack('>c4Bc1I2c0', '\148\160\160\204', size, '\218', #joined, joined)
  elseif count < 250 or ids[1] == ids[count] then
    packed = encode({'', '', size, joined})
  else
    local one, other, from, to = ids[1], ids[count], 1, size
    while string.byte(one, from) == string.byte(other, from) do from = from + 1 end
    while string.byte(one, to) == string.byte(other, to) do to = to - 1 end
    local heading, tail, parts = sub(one, 1, from - 1), sub(one, to + 1), {}
    for i = 1, count do parts[i] = sub(ids[i], from, to) end
    -- Comparing them as a whole takes less time than one by one.
    if heading .. table.concat(parts, tail .. heading) .. tail == joined then
      packed = encode({heading, tail, to - from + 1, table.concat(parts)})
    else
      packed = encode({'', '', size, joined})
    end
  end
end
