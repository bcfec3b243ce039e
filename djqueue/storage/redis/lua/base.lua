-- The functions of the scripts that change a queue; see request.lua for what these are called with.
--! include request numbers

local changed, codes, incidents, has_moved = {}, {}, {}, false

--! insert watched

-- Write a changed job to the stream of changes. code: that of its new state, 'u' if the state is the same, 'r' if the
-- job was removed.
local function note(id, code)
  local n = #changed + 1
  changed[n], codes[n] = id, code
end

-- remembered: the reply to a repetition of this request, if it is another one.
local function answer(reply, remembered)
  call('HDEL', META, 'plain') -- this script may have added what finish_and_claim_plain.lua does not look for
  local ids, packed, states = changed, nil, nil
  if #ids > 0 then
    states = table.concat(codes)
    --! insert packed_ids
  end
  local reported = #incidents > 0 and incidents or nil
  local memory = ARGV[2] .. encode({0, remembered or reply, reported})
  --! insert answer
end
