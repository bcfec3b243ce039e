-- Read the names of jobs until enough bytes were looked at.
--
-- ARGV: 1 the time, the size in bytes of the records after which a call ends; then the ids.
-- Returns the names, '' for a job that does not exist; the last ids may be left out.
--! include layout
--! keys jobs

local most_bytes, size, names = tonumber(ARGV[2]), 0, {}
for i = 3, #ARGV do
  if size >= most_bytes then break end
  local blob = call('HGET', JOBS, ARGV[i])
  names[i - 2] = blob and name_of(blob) or ''
  size = size + (blob and #blob or 0)
end
return names
