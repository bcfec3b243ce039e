-- Limits and token buckets.
--
-- A bucket counts parts of tokens: `per` parts make a token, and each millisecond adds `capacity` parts.

-- Return capacity, per and concurrency: those set at run time, or else those of the settings ('' for none).
-- overrides: limited, capacity, per, concurrency.
local function limits_of(overrides, capacity, per, concurrency)
  if overrides[1] then capacity, per, concurrency = overrides[2], overrides[3], overrides[4] end
  return tonumber(capacity), tonumber(per), tonumber(concurrency)
end

-- Return the parts in a bucket: it is full if nothing was stored for this rate.
-- returned: parts of tokens that were granted and not used.
local function parts_of(capacity, per, rate, parts, filled, returned)
  local full = capacity * per
  if rate ~= capacity .. '/' .. per then return full end
  return math.min(full, tonumber(parts) + math.max(0, now - tonumber(filled)) * capacity + (returned or 0))
end

local function store_bucket(key, field, capacity, per, parts)
  local format = string.format
  call('HSET', key, field, capacity .. '/' .. per, 'parts', format('%.17g', parts), 'filled', format('%.0f', now))
end
