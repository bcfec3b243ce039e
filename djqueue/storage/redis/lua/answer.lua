-- Publish and remember what the script did, and return its reply.
--
-- A script inserts it at its end, after it has set `reply`; `memory`, the number of this request and the answer
-- to a repetition (MessagePack); `reported`, its incidents or nil; and, if jobs changed, `packed`, their ids (see packed_ids.lua), and
-- `states`, their codes.
if #events > 0 then
  call(ARGV[4], ARGV[3] .. ':events', encode(events))
end
if woken then
  call(ARGV[4], ARGV[3] .. ':wake', '')
end
if states and ARGV[5] ~= '0' then
  call('XADD', LOG, 'MAXLEN', '~', ARGV[5], '*', 'i', packed, 's', states)
end
if not unchanged then
  -- A new expiry would take longer than the rest; without the key, pages read again.
  local version = time[1] .. ':' .. time[2]
  if not call('SET', VERSION, version, 'XX', 'KEEPTTL') then call('SET', VERSION, version, 'PX', DAY) end
end
call('SET', SEQUENCE, memory, 'PX', MINUTE_TEXT)
do return {has_outbox and call('LLEN', OUTBOX) or 0, reply, reported} end
