-- Scan a queue's jobs in certain states.
--
-- ARGV: 1 the time, the cursor, approximate number of jobs, the state codes wanted, and '' or a time before which they
--   ended or, if pending, were enqueued.
-- Returns the next cursor, and of each job when it was enqueued and its id.
--! keys jobs st

local found = redis.call('HSCAN', JOBS, ARGV[2], 'COUNT', ARGV[3])
local wanted, before = ARGV[4], tonumber(ARGV[5])
local replies = {}
for i = 1, #found[2], 2 do
  local id, blob = found[2][i], found[2][i + 1]
  local st = redis.call('HGET', ST, id)
  local code = st and string.sub(st, 1, 1) or 'w'
  if string.find(wanted, code, 1, true) then
    local created = struct.unpack('>I8', blob, 9)
    local at = created
    if code == 'c' or code == 'x' or code == 'f' then at = struct.unpack('>I8', st, 10) end
    if not before or at < before then
      replies[#replies + 1] = string.format('%.0f', created)
      replies[#replies + 1] = id
    end
  end
end
return {found[1], replies}
