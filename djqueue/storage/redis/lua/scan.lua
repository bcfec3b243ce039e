-- Scan a queue's jobs in certain states.
--
-- ARGV: 1 the time, the cursor, maximum number of jobs and bytes to look at, the state codes wanted, and '' or a time
--   before which they ended or, if pending, were enqueued.
-- Returns the next cursor ('0' at the end), and of each job when it was enqueued and its id.
--! include scanning
--! keys jobs st

local wanted, before = ARGV[5], tonumber(ARGV[6])
local replies = {}

local function add(entries)
  local size = 0
  for i = 1, #entries, 2 do
    local id, blob = entries[i], entries[i + 1]
    local st = call('HGET', ST, id)
    local code = st and sub(st, 1, 1) or 'w'
    size = size + #blob
    if string.find(wanted, code, 1, true) then
      local created = unpack_number('>I8', blob, 9)
      local at = ENDED[code] and unpack_number('>I8', st, 10) or created
      if not before or at < before then
        replies[#replies + 1] = string.format('%.0f', created)
        replies[#replies + 1] = id
      end
    end
  end
  return #entries / 2, size
end

local following = scan(JOBS, ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), 1, 0, add)
return {following == '' and '0' or following, replies}
