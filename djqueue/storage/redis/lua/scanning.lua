-- Scan a part of a hash in bounded steps.
--
-- A hash is scanned in the order of its cursors, which is that of the bucket numbers with their bits reversed: the
-- buckets with one remainder by a power of two are next to each other, whatever the size of the table.
--! include layout

-- Return where the next part begins; 0 after the last one.
local function next_part(divisor, rest)
  local bit = divisor / 2
  while bit >= 1 and rest % (2 * bit) >= bit do
    rest = rest - bit
    bit = bit / 2
  end
  return bit >= 1 and rest + bit or 0
end

-- Scan until `count` entries or `most_bytes` bytes were read; return the next cursor, '' at the end.
--
-- A value may have a hundred bytes or a megabyte, and each is copied whole. Therefore the first step has one bucket, and
-- further ones at most what fits by the average so far.
-- divisor, rest: the part; 1 and 0 for all entries.
-- add: takes the entries of a step; returns their number and bytes.
-- keys_only: leave the values out, if the server can (Redis 7.4, Valkey 8). `add` also gets whether they are there.
local function scan(key, cursor, count, most_bytes, divisor, rest, add, keys_only)
  local position, limit = tonumber(cursor), next_part(divisor, rest)
  local step, most_step, seen, size, asked = 1, count, 0, 0, 0
  while true do
    local from, found = string.format('%.0f', position), nil
    if keys_only then
      found = redis.pcall('HSCAN', key, from, 'COUNT', step, 'NOVALUES')
      keys_only = not found.err
    end
    if not keys_only then found = call('HSCAN', key, from, 'COUNT', step) end
    local following = tonumber(found[1])
    local is_inside = following ~= 0 and following % divisor == rest
    if is_inside or following == limit then
      local entries, bytes = add(found[2], not keys_only)
      seen, size = seen + entries, size + bytes
      if not is_inside then return '' end
      position = following
    elseif step == 1 then
      return '' -- it skipped empty buckets, and read the first entries of the next part
    else
      most_step = floor(step / 2) -- it went on into the next part: repeat it with fewer buckets
    end
    asked = asked + step
    local fitting = size == 0 and count or floor((most_bytes - size) * seen / size)
    -- A table that has become almost empty has few entries in many buckets.
    if seen >= count or fitting < 1 or asked >= 2 * count then return string.format('%.0f', position) end
    step = math.max(1, math.min(2 * step, most_step, count - seen, fitting))
  end
end
