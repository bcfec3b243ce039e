-- What there is of one kind above what the queue keeps: those whose time would be over first, or, of dead letters, the
-- oldest. Arguments: the letter of the outcome, or 'r' for results; how many are kept, and how many bytes ('' each: as
-- many as there are); where to begin among all records, and how many are looked at.
-- Answers where to go on (-1: there is no more), and ids.
--! keys finished st count dead sizes results

local letter, most, bytes = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local function counted(field) return tonumber(redis.call('HGET', COUNT, field) or 0) end

local surplus, excess = 0, 0
if most then surplus = counted(letter) - counted('h' .. letter) - most end
if bytes then
  excess = counted('B' .. letter) - bytes
  if letter == 'c' then excess = excess + counted('Br') end
end
if surplus <= 0 and excess <= 0 then return {-1, {}} end

local FOREVER = 4503599627370496
local first, many = tonumber(ARGV[5]), tonumber(ARGV[6])
local order = letter == 'r' and RESULTS or letter == 'f' and DEAD or FINISHED
local places = redis.call('ZRANGE', order, first, first + many - 1, 'WITHSCORES')
local ids, found = {}, {}
for i = 1, #places, 2 do ids[#ids + 1] = places[i] end
if #ids > 0 then
  local sts = redis.call('HMGET', ST, unpack(ids))
  local sizes = bytes and redis.call('HMGET', SIZES, unpack(ids)) or {}
  for i = 1, #ids do
    local is_one = letter == 'r' or sts[i] and string.sub(sts[i], 1, 1) == letter
    if is_one and order == FINISHED and struct.unpack('>I8', sts[i], 18) == 0 then
      -- One that is held for others has no end, and a place before those that are kept for ever.
      is_one = tonumber(places[2 * i]) >= FOREVER
    end
    if is_one and (#found < surplus or excess > 0) then
      found[#found + 1] = ids[i]
      if sizes[i] then
        local size, result = struct.unpack('>I4I4', sizes[i])
        excess = excess - result - (letter == 'r' and 0 or size)
      end
    end
  end
end
return {#ids == many and first + many - #found or -1, found}
