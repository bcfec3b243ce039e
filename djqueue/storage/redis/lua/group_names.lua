-- Iterate over the groups that have waiting jobs.
--! keys group_waiting group_ready

-- Return the name of the first group behind another one ('' for the first of all), or nil.
local function next_group(after)
  local name
  for _, key in ipairs({GROUP_WAITING, GROUP_READY}) do
    local entry = call('ZRANGEBYLEX', key, after == '' and '-' or '(' .. after .. AFTER, '+', 'LIMIT', 0, 1)[1]
    local found = entry and sub(entry, 1, string.find(entry, NUL, 1, true) - 1)
    if found and (not name or found < name) then name = found end
  end
  return name
end
