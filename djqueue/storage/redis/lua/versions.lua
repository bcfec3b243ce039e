-- Compare versions of writes, which have up to 64 bits: Lua's numbers would round those above 2^53.
--
-- A version is its decimal digits, without leading zeros.

local function is_later(version, than)
  if #version ~= #than then return #version > #than end
  return version > than
end
