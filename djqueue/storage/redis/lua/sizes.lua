-- Estimate the memory of a queue's larger keys from five samples each.
--
-- Returns for each its bytes, 0 if it does not exist, or -1 if the user may not ask.
--! keys jobs st w z due lease finished dead_letters hist log meta

local MEMORY = 'MEMORY'
local found = {}
for i = 1, #KEYS do
  local bytes = redis.pcall(MEMORY, 'USAGE', KEYS[i], 'SAMPLES', 5)
  found[i] = type(bytes) == 'number' and bytes or bytes and -1 or 0
end
return found
