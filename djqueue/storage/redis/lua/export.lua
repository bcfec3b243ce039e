-- Some of a queue's jobs, of one part of them. See `djqueue.storage.redis.export`.
--
-- The jobs are those of a hash, in the order of its cursors. Its buckets come in the order of their numbers' bits read
-- from the lowest to the highest: so those of one remainder by a power of two come together, however long the table is.
-- Arguments: the hash (jobs st letters), the cursor, about how many jobs, by what the hash is divided, and the remainder;
-- the letters of the states wanted, times from which on and before which they were enqueued, or ended ('' for none), which
-- of these two ('c' or 'f'), whether with payloads, and whether with ended runs ('1' or '').
-- Answers the next cursor ('' at the end), the time, and of each job: its id, its record (without number and payload),
-- its state or '', and its ended runs or ''; of letters, its id, the letter and its state or ''.
--! keys jobs st hist letters

local call, sub, find, unpack_number = redis.call, string.sub, string.find, struct.unpack
local time = call('TIME')
local now = tonumber(ARGV[1]) or time[1] * 1000 + math.floor(time[2] / 1000)
local kind, cursor, many = ARGV[2], ARGV[3], ARGV[4]
local divisor, rest = tonumber(ARGV[5]), tonumber(ARGV[6])
local wanted, from, before, by = ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10]
local payloads, runs = ARGV[11] == '1', ARGV[12] == '1'
local keys = {jobs = JOBS, st = ST, letters = LETTERS}
local key = keys[kind]

-- A table that is no longer than a few times the divisor is not divided: one part has all of it.
if divisor > 1 and call('HLEN', key) < 64 * divisor then
  if rest > 0 then return {'', string.format('%.0f', now), {}} end
  divisor = 1
end

-- Where the part behind this one begins; 0 behind the last one.
local function behind(number)
  local bit = divisor / 2
  while bit >= 1 and number % (2 * bit) >= bit do
    number = number - bit
    bit = bit / 2
  end
  return bit >= 1 and number + bit or 0
end

local limit = behind(rest)
local function is_in(place)
  return place ~= 0 and place % divisor == rest
end

local found = call('HSCAN', key, cursor, 'COUNT', many)
local place = tonumber(found[1])
local entries = found[2]
if not is_in(place) and place ~= limit then
  -- It went on into the next part: so again, a bucket at a time.
  place, entries = tonumber(cursor), {}
  repeat
    local some = call('HSCAN', key, string.format('%.0f', place), 'COUNT', 1)
    place = tonumber(some[1])
    if is_in(place) or place == limit then
      for i = 1, #some[2] do entries[#entries + 1] = some[2][i] end
    end
  until not is_in(place)
end
local following = is_in(place) and string.format('%.0f', place) or ''

local ids = {}
for i = 1, #entries, 2 do ids[#ids + 1] = entries[i] end
local function all_of(hash)
  local values = {}
  for first = 1, #ids, 4000 do
    local last = math.min(first + 3999, #ids)
    local some = call('HMGET', hash, unpack(ids, first, last))
    for i = 1, #some do values[first + i - 1] = some[i] end
  end
  return values
end

local replies, n = {}, 0
if kind == 'letters' then
  local states = all_of(ST)
  for i, id in ipairs(ids) do
    replies[n + 1], replies[n + 2], replies[n + 3] = id, entries[2 * i], states[i] or ''
    n = n + 3
  end
  return {following, string.format('%.0f', now), replies}
end

local blobs, states = kind == 'st' and all_of(JOBS), kind == 'jobs' and all_of(ST)
local history = runs and all_of(HIST) or {}
for i, id in ipairs(ids) do
  local blob, st = blobs and blobs[i], states and states[i]
  if kind == 'jobs' then blob = entries[2 * i] else st = entries[2 * i] end
  local letter = st and sub(st, 1, 1) or 'w'
  local ended, over
  if blob and (letter == 'c' or letter == 'f' or letter == 'x') then
    ended, over = unpack_number('>I8I8', st, 10)
    over = over ~= 0 and over <= now
  end
  if blob and not over and find(wanted, letter, 1, true) then
    local at = by == 'f' and ended or unpack_number('>I8', blob, 9)
    if not (from and at < from) and not (before and at >= before) then
      local length = unpack_number('>I2', blob, 18)
      local upto = payloads and -1 or 23 + length + unpack_number('>I4', blob, 20 + length)
      replies[n + 1], replies[n + 2] = id, sub(blob, 9, upto)
      replies[n + 3], replies[n + 4] = st or '', history[i] or ''
      n = n + 4
    end
  end
end
return {following, string.format('%.0f', now), replies}
