-- What connects jobs with others. Arguments: how many that depend on a job are told at most, then ids.
-- Answers the time, and of each job its record without the payload, its state, and of those that wait for it or may
-- read its record queue and id in turn.
--! keys jobs st deps holds

local call, sub = redis.call, string.sub
local NUL, AFTER = string.char(0), string.char(1)
local time = call('TIME')
local now = tonumber(ARGV[1]) or time[1] * 1000 + math.floor(time[2] / 1000)
local most = tonumber(ARGV[2])

local function heading(blob)
  local length = struct.unpack('>I2', blob, 18)
  return sub(blob, 1, 23 + length + struct.unpack('>I4', blob, 20 + length))
end

-- skipped: bytes of an entry between the id and who it is.
local function put(found, key, id, skipped)
  for _, entry in ipairs(call('ZRANGEBYLEX', key, '[' .. id .. NUL, '(' .. id .. AFTER, 'LIMIT', 0, most)) do
    local who = sub(entry, #id + 2 + skipped)
    if who ~= '' then
      who = cmsgpack.unpack(who)
      found[#found + 1], found[#found + 2] = who[1], who[2]
    end
  end
end

local replies = {}
for i = 3, #ARGV do
  local id = ARGV[i]
  local blob, found = call('HGET', JOBS, id), {}
  if blob then
    put(found, DEPS, id, 8)
    put(found, HOLDS, id, 0)
  end
  replies[i - 2] = blob and {heading(blob), call('HGET', ST, id), found}
end
return {string.format('%.0f', now), replies}
