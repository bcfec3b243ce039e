-- Records of one outcome above what the queue keeps: those whose time would be over first. Arguments: the letter of
-- the outcome, how many are kept, where to begin among all records, and how many are looked at.
-- Answers where to go on (0: at the beginning), and ids.
--! keys finished st count

local surplus = tonumber(redis.call('HGET', COUNT, ARGV[2]) or 0) - tonumber(ARGV[3])
if surplus <= 0 then return {0, {}} end
local first, many = tonumber(ARGV[4]), tonumber(ARGV[5])
local ids = redis.call('ZRANGE', FINISHED, first, first + many - 1)
local found = {}
if #ids > 0 then
  local sts = redis.call('HMGET', ST, unpack(ids))
  for i = 1, #ids do
    if sts[i] and string.sub(sts[i], 1, 1) == ARGV[2] and #found < surplus then
      found[#found + 1] = ids[i]
    end
  end
end
return {#ids == many and first + many - #found or 0, found}
