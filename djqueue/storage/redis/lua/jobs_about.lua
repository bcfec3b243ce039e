-- Jobs about a subject, newest first. Arguments: the subject; behind what (when enqueued, and the number, or the first of
-- these; '' begins with the newest); how many at most.
-- Answers the time, and of each its id, its record without what it was given, and its entry in st.
--! keys about jobs st

local call, sub, unpack_number = redis.call, string.sub, struct.unpack
local time = call('TIME')
local clock = time[1] * 1000 + math.floor(time[2] / 1000)
local now = tonumber(ARGV[1]) or clock
local subject, mark, many = ARGV[2], ARGV[3], tonumber(ARGV[4])
local first = #subject + 18

local function is_over(st)
  local letter = st and sub(st, 1, 1)
  if letter ~= 'c' and letter ~= 'x' and letter ~= 'f' then return false end
  local expires = unpack_number('>I8', st, 18)
  return expires ~= 0 and expires <= now
end

local found, high = {}, '(' .. subject .. (mark == '' and '\1' or '\0' .. mark)
while #found < 3 * many do
  local entries = call('ZREVRANGEBYLEX', ABOUT, high, '[' .. subject .. '\0', 'LIMIT', 0, many)
  for _, entry in ipairs(entries) do
    local id = sub(entry, first)
    local blob, st = call('HGET', JOBS, id), call('HGET', ST, id)
    local is_this = blob and sub(blob, 1, 8) == sub(entry, first - 8, first - 1) -- and not another of its id
    if is_this and not is_over(st) and #found < 3 * many then
      local at = 20 + unpack_number('>I2', blob, 18)
      local n = #found
      found[n + 1], found[n + 2] = id, sub(blob, 1, at + 3 + unpack_number('>I4', blob, at))
      found[n + 3] = st or ''
    end
    high = '(' .. entry
  end
  if #entries < many then break end
end
return {string.format('%.0f', now), found}
