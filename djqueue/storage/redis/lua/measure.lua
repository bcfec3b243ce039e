-- Metrics: a hash for each bucket length and stretch of time, which expires, and one for all time.
--
-- Its fields are a bucket's start, or that .. NUL .. a job's name, each with counters and histograms as one list of
-- numbers (see `values_of` in core/metrics.py), and 'names': the job names that it has.
-- tiers: of each bucket length {length, stretch, number of the first stretch that has a key, milliseconds for which a
-- hash is kept}. From KEYS[first_key] on there are the keys of three stretches of each. The last one, {0}, is all time,
-- and has one key.

local measure
do
  local function totals()
    local kept = call('HMGET', META, 'gone', 'gone:c', 'gone:x', 'retried', 'stalled', 'otherwise', 'buried')
    for i = 1, 7 do kept[i] = tonumber(kept[i] or 0) end
    local after_end = call('HMGET', META, 'c', 'x')
    local done, cancelled = (after_end[1] or 0) + kept[2], (after_end[2] or 0) + kept[3]
    local started = done + kept[4] + kept[5] + kept[6] + call('ZCARD', LEASE)
    return {call('HLEN', JOBS) + kept[1] + kept[2] + kept[3], started, done, kept[4], kept[7], cancelled, kept[5]}
  end

  -- Return by how much the totals have increased since the last call, or nil.
  local function increases()
    local found, noted = totals(), call('HGET', META, 'noted')
    noted = noted and decode(noted) or {0, 0, 0, 0, 0, 0, 0}
    local risen, any = {}, false
    for i = 1, 7 do
      risen[i] = found[i] - noted[i]
      any = any or risen[i] ~= 0
    end
    if not any then return nil end
    call('HSET', META, 'noted', encode(found))
    return risen
  end

  local function add_to(key, field, more)
    local kept = call('HGET', key, field)
    local values = kept and decode(kept) or {}
    for i = 1, METRIC_NUMBERS do values[i] = (values[i] or 0) + (more[i] or 0) end
    call('HSET', key, field, encode(values))
  end

  local function named(key, name)
    local kept = call('HGET', key, 'names')
    local names = kept and decode(kept) or {}
    for _, one in ipairs(names) do
      if one == name then return name end
    end
    if #names >= METRIC_NAMES then return nil end
    names[#names + 1] = name
    call('HSET', key, 'names', encode(names))
    return name
  end

  -- Return key and start of the current bucket of a length; nothing if the caller's clock is far off.
  local function bucket_of(tier, first_key)
    if tier[1] == 0 then return KEYS[first_key], '0' end
    local index = floor(now / tier[2]) - tier[3]
    if index < 0 or index > 2 then return nil end
    return KEYS[first_key + index], string.format('%.0f', now - now % tier[1])
  end

  -- Add the increase of the totals, or what workers report: names and values in turn. others: the name for values of
  -- names above METRIC_NAMES. Adds to all tiers or to none, and nothing for a queue that does not exist.
  function measure(tiers, first_key, runs, others)
    if call('HEXISTS', META, 'rear') == 0 and call('HLEN', JOBS) == 0 then return end
    for i, tier in ipairs(tiers) do
      if not bucket_of(tier, first_key + 3 * (i - 1)) then return end
    end
    local risen = not runs and increases()
    if not runs and not risen then return end
    for i, tier in ipairs(tiers) do
      local key, start = bucket_of(tier, first_key + 3 * (i - 1))
      if risen then add_to(key, start, risen) end
      for at = 1, runs and #runs or 0, 2 do
        local values, times = runs[at + 1], {}
        for place = 8, METRIC_NUMBERS do times[place] = values[place] end
        for place = 1, 7 do times[place] = 0 end
        add_to(key, start, times)
        add_to(key, start .. NUL .. (named(key, runs[at]) or others), values)
      end
      if tier[4] then call('PEXPIRE', key, tier[4]) end
    end
    return true
  end
end
