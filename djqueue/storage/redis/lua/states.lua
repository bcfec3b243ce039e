-- Letters of jobs' states; '' for one that is not there, or whose time is over. Arguments: ids.
--! keys jobs st

local time = redis.call('TIME')
local clock = time[1] * 1000 + math.floor(time[2] / 1000)
local now = tonumber(ARGV[1]) or clock
local replies = {}
for i = 2, #ARGV do
  local st = redis.call('HGET', ST, ARGV[i])
  local reply = ''
  if st then
    reply = string.sub(st, 1, 1)
    if reply == 'c' or reply == 'x' or reply == 'f' then
      local expires = struct.unpack('>I8', st, 18)
      if expires ~= 0 and expires <= now then reply = '' end
    end
  elseif redis.call('HEXISTS', JOBS, ARGV[i]) == 1 then
    reply = 'w'
  end
  replies[i - 1] = reply
end
return replies
