-- Find records above a bound: those that expire first, or the oldest dead letters.
--
-- ARGV: 1 the time; the outcome's state code, or 'r' for results; maximum number and maximum bytes ('' each for none); the
--   index at which to begin, and how many records to look at.
-- Returns the index at which to go on (-1 at the end), and ids.
--! keys finished st meta dead sizes results

local code, limit, bytes = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local function counted(field) return tonumber(redis.call('HGET', META, field) or 0) end

local surplus, excess = 0, 0
if limit then surplus = counted(code) - counted('h' .. code) - limit end
if bytes then
  excess = counted('B' .. code) - bytes
  if code == 'c' then excess = excess + counted('Br') end
end
if surplus <= 0 and excess <= 0 then return {-1, {}} end

local first, page_size = tonumber(ARGV[5]), tonumber(ARGV[6])
local order = code == 'r' and RESULTS or code == 'f' and DEAD or FINISHED
local entries = redis.call('ZRANGE', order, first, first + page_size - 1, 'WITHSCORES')
local ids, found = {}, {}
for i = 1, #entries, 2 do ids[#ids + 1] = entries[i] end
if #ids > 0 then
  local sts = redis.call('HMGET', ST, unpack(ids))
  local sizes = bytes and redis.call('HMGET', SIZES, unpack(ids)) or {}
  for i = 1, #ids do
    local is_one = code == 'r' or sts[i] and string.sub(sts[i], 1, 1) == code
    if is_one and order == FINISHED and struct.unpack('>I8', sts[i], 18) == 0 then
      -- A held record does not expire, and has a score below those that are kept forever.
      is_one = tonumber(entries[2 * i]) >= FOREVER
    end
    if is_one and (#found < surplus or excess > 0) then
      found[#found + 1] = ids[i]
      if sizes[i] then
        local size, result = struct.unpack('>I4I4', sizes[i])
        excess = excess - result - (code == 'r' and 0 or size)
      end
    end
  end
end
return {#ids == page_size and first + page_size - #found or -1, found}
