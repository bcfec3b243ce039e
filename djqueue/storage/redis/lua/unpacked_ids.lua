-- Read the ids that packed_ids.lua has packed in `packed` into the list `ids`.
local ids = cmsgpack.unpack(packed)
if type(ids[3]) == 'number' then
  local heading, tail, size, joined = unpack(ids)
  ids = {}
  for at = 1, #joined, size do ids[#ids + 1] = heading .. string.sub(joined, at, at + size - 1) .. tail end
end
