-- Bytes of the queue's larger keys, each from five samples: 0 for one that is not there, -1 if it may not be asked.
--! keys jobs st w z due lease finished letters hist log meta count

local MEMORY = 'MEMORY'
local found = {}
for i = 1, #KEYS do
  local bytes = redis.pcall(MEMORY, 'USAGE', KEYS[i], 'SAMPLES', 5)
  found[i] = type(bytes) == 'number' and bytes or bytes and -1 or 0
end
return found
