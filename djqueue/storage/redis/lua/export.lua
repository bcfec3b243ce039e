-- Read a part of a queue's jobs or dead letters: see `djqueue.storage.redis.export`.
--
-- ARGV: 1 the time; the hash (jobs, st, dead_letters), the cursor, maximum number of jobs and bytes to look at, the divisor
--   and the remainder; the state codes wanted, the times from which on and before which the jobs were enqueued or ended
--   ('' for none), which of these two ('c' or 'f'); letters for what is wanted: b records, p with payloads, s state entries,
--   h ended attempts; the names wanted, and lists of strings of which the options contain one of each (MessagePack; '' for
--   all jobs); then, to read only certain jobs, their ids.
-- Returns {next cursor or '' at the end, time, ids, records without number, state entries, ended attempts}: lists, empty
--   if not wanted, with '' for what a job does not have. For dead letters, these are the records. With ids, the cursor is the
--   number of those that were looked up.
--! include reading scanning
--! keys jobs st hist dead_letters

local find = string.find
local kind, count, most_bytes = ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5])
local divisor, rest = tonumber(ARGV[6]), tonumber(ARGV[7])
local wanted, from, before, by, parts = ARGV[8], tonumber(ARGV[9]), tonumber(ARGV[10]), ARGV[11], ARGV[12]
local payloads, states, runs = find(parts, 'p', 1, true), find(parts, 's', 1, true), find(parts, 'h', 1, true)
local records = payloads or find(parts, 'b', 1, true)
local filter = ARGV[13] ~= '' and cmsgpack.unpack(ARGV[13])
local needs_record = records or filter or #ARGV > 13 or by == 'c' and (from or before)
local keys = {jobs = JOBS, st = ST, dead_letters = DEAD_LETTERS}
local key = keys[kind]

-- A small table is not divided: one part has all of it.
if divisor > 1 and call('HLEN', key) < 64 * divisor then
  if rest > 0 then return {'', string.format('%.0f', now), {}, {}, {}, {}} end
  divisor = 1
end

local function all_of(hash, ids)
  local values = {}
  for first = 1, #ids, CHUNK do
    local last = math.min(first + CHUNK - 1, #ids)
    local some = call('HMGET', hash, unpack(ids, first, last))
    for i = 1, #some do values[first + i - 1] = some[i] end
  end
  return values
end

local function bytes_of(values)
  local size = 0
  for i = 1, #values do size = size + (values[i] and #values[i] or 0) end
  return size
end

local found_ids, found_records, found_states, found_runs, n = {}, {}, {}, {}, 0

local function is_in_time(blob, st)
  if not from and not before then return true end
  local is_end = by == 'f' and st and ENDED[sub(st, 1, 1)]
  local at = is_end and unpack_number('>I8', st, 10) or unpack_number('>I8', blob, 9)
  return not (from and at < from) and not (before and at >= before)
end

local function contains_one(options, texts)
  for _, one in ipairs(texts) do
    if find(options, one, 1, true) then return true end
  end
  return false
end

local names = filter and #filter[1] > 0 and {}
for _, name in ipairs(names and filter[1] or {}) do names[name] = true end

local function passes(blob)
  if not filter then return true end
  if names and not names[name_of(blob)] then return false end
  local options = sub(blob, options_range(blob))
  for i = 2, #filter do
    if not contains_one(options, filter[i]) then return false end
  end
  return true
end

local function add_jobs(ids, blobs, sts)
  local chosen, theirs, size = {}, {}, bytes_of(sts)
  for i, id in ipairs(ids) do
    local st = sts[i]
    if not has_expired(st) and find(wanted, st and sub(st, 1, 1) or 'w', 1, true) then
      local at = #chosen + 1
      chosen[at], theirs[at] = id, st
      if blobs then blobs[at] = blobs[i] end
    end
  end
  if needs_record and not blobs then
    blobs = all_of(JOBS, chosen)
    size = size + bytes_of(blobs)
  end
  local histories = runs and all_of(HIST, chosen) or {}
  for i, id in ipairs(chosen) do
    local blob, st = blobs and blobs[i], theirs[i]
    if not needs_record or (blob and passes(blob) and is_in_time(blob, st)) then
      n = n + 1
      found_ids[n] = id
      if records then
        local _, last = options_range(blob)
        found_records[n] = sub(blob, 9, payloads and -1 or last)
      end
      if states then found_states[n] = st or '' end
      if runs then found_runs[n] = histories[i] or '' end
    end
  end
  return size + bytes_of(histories)
end

local function add_dead_letters(ids, letters)
  local sts = states and all_of(ST, ids)
  for i, id in ipairs(ids) do
    n = n + 1
    found_ids[n], found_records[n] = id, letters[i]
    if states then found_states[n] = sts[i] or '' end
  end
  return 0
end

local function add(entries, has_values)
  local ids, values = entries, nil
  if has_values then
    ids, values = {}, {}
    for i = 1, #entries, 2 do ids[#ids + 1], values[#values + 1] = entries[i], entries[i + 1] end
  end
  local size = bytes_of(ids) + (values and bytes_of(values) or 0)
  if kind == 'dead_letters' then return #ids, size + add_dead_letters(ids, values) end
  if kind == 'st' then return #ids, size + add_jobs(ids, nil, values) end
  return #ids, size + add_jobs(ids, values, all_of(ST, ids))
end

if #ARGV > 13 then
  local at, size = 14, 0
  while at <= #ARGV and size < most_bytes do
    local ids = {ARGV[at]}
    local letter = kind == 'dead_letters' and call('HGET', DEAD_LETTERS, ids[1])
    if letter then
      size = size + #letter + add_dead_letters(ids, {letter})
    elseif kind ~= 'dead_letters' then
      size = size + add_jobs(ids, nil, all_of(ST, ids))
    end
    at = at + 1
  end
  local looked_up = string.format('%.0f', at - 14)
  return {looked_up, string.format('%.0f', now), found_ids, found_records, found_states, found_runs}
end

local keys_only = kind == 'jobs' and not needs_record
local following = scan(key, ARGV[3], count, most_bytes, divisor, rest, add, keys_only)
return {following, string.format('%.0f', now), found_ids, found_records, found_states, found_runs}
