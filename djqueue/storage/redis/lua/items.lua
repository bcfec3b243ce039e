-- Items of jobs behind a mark. Arguments: at how many bytes an answer ends, how many items it has at most; then of
-- each job its id, the run that the mark is of, and how many of its items are before. Keys: of each, its items.
-- Answers the time, and of each job its record without the payload, its state, the first item's number, and items.
--! keys jobs st

local CHUNK = 20
local time = redis.call('TIME')
local now = tonumber(ARGV[1]) or time[1] * 1000 + math.floor(time[2] / 1000)
local most_bytes, most = tonumber(ARGV[2]), tonumber(ARGV[3])

local function heading(blob)
  local length = struct.unpack('>I2', blob, 18)
  return string.sub(blob, 1, 23 + length + struct.unpack('>I4', blob, 20 + length))
end

local function count_of(st)
  local is_over = string.find('cfx', string.sub(st, 1, 1), 1, true)
  return cmsgpack.unpack(string.sub(st, is_over and 26 or 10))[13] or 0
end

local function behind(key, first)
  local found, size = {}, 0
  while size < most_bytes and #found < most do
    local some = redis.call('LRANGE', key, first + #found, first + #found + CHUNK - 1)
    for _, item in ipairs(some) do
      if size >= most_bytes or #found == most then break end
      found[#found + 1] = item
      size = size + #item
    end
    if #some < CHUNK then break end
  end
  return found
end

local replies = {}
for i = 4, #ARGV, 3 do
  local id, key = ARGV[i], KEYS[FIXED + (i - 1) / 3]
  local blob, st = redis.call('HGET', JOBS, id), redis.call('HGET', ST, id)
  local first, found = 0, {}
  if st and count_of(st) > 0 then
    if string.sub(st, 2, 9) == ARGV[i + 1] then first = tonumber(ARGV[i + 2]) end
    found = behind(key, first)
  end
  replies[#replies + 1] = blob and {heading(blob), st, first, found}
end
return {string.format('%.0f', now), replies}
