-- Search the list of waiting jobs.

-- Return the index of the first entry whose number is not lower. Numbers ascend, and removed entries are empty.
-- probes: how many empty entries in a row are skipped at most.
local function index_from(number, probes)
  local low, high = 0, call('LLEN', W)
  while low < high do
    local middle = math.floor((low + high) / 2)
    local at, entry = middle, call('LINDEX', W, middle)
    while entry == '' and at < high - 1 and at - middle < probes do
      at = at + 1
      entry = call('LINDEX', W, at)
    end
    if entry and entry ~= '' and sub(entry, 1, 8) < number then low = at + 1 else high = middle end
  end
  return low
end
