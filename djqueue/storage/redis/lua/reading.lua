-- Functions of scripts that only read.
--! include layout

local function without_payload(blob)
  local _, last = options_range(blob)
  return sub(blob, 1, last)
end

-- Return whether an entry of `st` is of an ended job that has expired.
local function has_expired(st)
  if not st or not ENDED[sub(st, 1, 1)] then return false end
  local expires = unpack_number('>I8', st, 18)
  return expires ~= 0 and expires <= now
end
