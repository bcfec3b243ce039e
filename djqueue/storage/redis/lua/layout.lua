-- Parts of a record in `jobs` and of an entry in `st`; see job.lua for their layout.
--! include common

local function name_of(blob)
  return sub(blob, 20, 19 + unpack_number('>I2', blob, 18))
end

-- Return where the options of a record begin, and where they end.
local function options_range(blob)
  local start = 24 + unpack_number('>I2', blob, 18)
  return start, start - 1 + unpack_number('>I4', blob, start - 4)
end
