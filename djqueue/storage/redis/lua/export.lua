-- Read a part of a queue's jobs or dead letters: see `djqueue.storage.redis.export`.
--
-- A hash is scanned in the order of its cursors, which is that of the bucket numbers with their bits reversed: the
-- buckets with one remainder by a power of two are next to each other, whatever the size of the table.
-- ARGV: 1 the time; the hash (jobs, st, dead_letters), the cursor, approximate number of jobs, the divisor and the
--   remainder; the state codes wanted, the times from which on and before which the jobs were enqueued or ended ('' for
--   none), which of these two ('c' or 'f'), whether with payloads, and whether with ended attempts ('1' or '').
-- Returns {next cursor or '' at the end, time, jobs}; each job is id, record without number (and payload), state entry or
--   '', ended attempts or ''; each dead letter is id, dead letter, state entry or ''.
--! include reading
--! keys jobs st hist dead_letters

local find = string.find
local kind, cursor, count = ARGV[2], ARGV[3], ARGV[4]
local divisor, rest = tonumber(ARGV[5]), tonumber(ARGV[6])
local wanted, from, before, by = ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10]
local payloads, runs = ARGV[11] == '1', ARGV[12] == '1'
local keys = {jobs = JOBS, st = ST, dead_letters = DEAD_LETTERS}
local key = keys[kind]

-- A small table is not divided: one part has all of it.
if divisor > 1 and call('HLEN', key) < 64 * divisor then
  if rest > 0 then return {'', string.format('%.0f', now), {}} end
  divisor = 1
end

-- Return where the next part begins; 0 after the last one.
local function behind(number)
  local bit = divisor / 2
  while bit >= 1 and number % (2 * bit) >= bit do
    number = number - bit
    bit = bit / 2
  end
  return bit >= 1 and number + bit or 0
end

local limit = behind(rest)
local function is_in(cursor_position)
  return cursor_position ~= 0 and cursor_position % divisor == rest
end

local found = call('HSCAN', key, cursor, 'COUNT', count)
local cursor_position = tonumber(found[1])
local entries = found[2]
if not is_in(cursor_position) and cursor_position ~= limit then
  -- The scan went on into the next part: repeat it one bucket at a time.
  cursor_position, entries = tonumber(cursor), {}
  repeat
    local some = call('HSCAN', key, string.format('%.0f', cursor_position), 'COUNT', 1)
    cursor_position = tonumber(some[1])
    if is_in(cursor_position) or cursor_position == limit then
      for i = 1, #some[2] do entries[#entries + 1] = some[2][i] end
    end
  until not is_in(cursor_position)
end
local following = is_in(cursor_position) and string.format('%.0f', cursor_position) or ''

local ids = {}
for i = 1, #entries, 2 do ids[#ids + 1] = entries[i] end
local function all_of(hash)
  local values = {}
  for first = 1, #ids, CHUNK do
    local last = math.min(first + CHUNK - 1, #ids)
    local some = call('HMGET', hash, unpack(ids, first, last))
    for i = 1, #some do values[first + i - 1] = some[i] end
  end
  return values
end

local replies, n = {}, 0
if kind == 'dead_letters' then
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
  local code = st and sub(st, 1, 1) or 'w'
  if blob and not has_expired(st) and find(wanted, code, 1, true) then
    local at = by == 'f' and ENDED[code] and unpack_number('>I8', st, 10) or unpack_number('>I8', blob, 9)
    if not (from and at < from) and not (before and at >= before) then
      local _, last = options_range(blob)
      local upto = payloads and -1 or last
      replies[n + 1], replies[n + 2] = id, sub(blob, 9, upto)
      replies[n + 3], replies[n + 4] = st or '', history[i] or ''
      n = n + 4
    end
  end
end
return {following, string.format('%.0f', now), replies}
