-- Purpose: entry cap of one user's mailbox: above it the oldest entries go and user_trim_seq rises to the greatest
--   removed sequence (§18.3.3).
-- KEYS: 1 shard hash {epoch}  2 trim hash: tenant:user -> be64 user_trim_seq
-- ARGV: 1 shard_epoch  2 tenant:user  3 mailbox key prefix, the UTC day follows  4 entries above which is trimmed
--   5 entries to leave  6 entries to remove at most by this call
-- RETURN: {0, entries removed, entries left}; {3}: a greater epoch is stored, {4}: a lower one; not 0: nothing was
--   written. Called again with 4 = 5 while more than 5 are left, it goes on where it stopped.
-- Atomicity: one step; user_trim_seq is raised first, so that no removed entry can ever look like a hole. An event group
--   goes whole or stays whole: the last one removed may leave fewer entries than 5 says.
-- Complexity: O(days) below the cap, O(removed * (days + log n)) above it.

local call, sub, unpack_bytes, floor = redis.call, string.sub, struct.unpack, math.floor
local FENCED, STALE, SLICE_ROWS = 3, 4, 64
local DAY_S, DAYS_KEPT = 86400, 8
local ABOVE = string.rep('\255', 9) -- behind a sequence: above every member that has it

local epoch, stored_epoch = tonumber(ARGV[1]), tonumber(call('HGET', KEYS[1], 'epoch') or 0)
if stored_epoch ~= epoch then
  return {stored_epoch > epoch and FENCED or STALE}
end
local total, days, today = 0, {}, floor(tonumber(call('TIME')[1]) / DAY_S)
for day = today - DAYS_KEPT, today + 1 do
  local key = ARGV[3] .. day
  local count = call('ZCARD', key)
  if count > 0 then
    total = total + count
    days[#days + 1] = {key = key, next = 0, slice = {}, at = 1}
  end
end
if total <= tonumber(ARGV[4]) then
  return {0, 0, total}
end

-- The next entry of a day: its sequence in `e` and `o`, gone behind the last one.
local function advance(day)
  if day.at > #day.slice then
    day.slice = call('ZRANGE', day.key, day.next, day.next + SLICE_ROWS - 1)
    day.next, day.at = day.next + #day.slice, 1
  end
  local member = day.slice[day.at]
  day.e, day.o, day.at = nil, nil, day.at + 1
  if member then
    day.e, day.o = unpack_bytes('>I2I6', member)
    day.head = member
  end
end

-- Walk the days in the order of sequences: the last of the entries that go.
for i = 1, #days do
  advance(days[i])
end
local last
for _ = 1, math.min(total - tonumber(ARGV[5]), tonumber(ARGV[6])) do
  local first
  for i = 1, #days do
    local day = days[i]
    if day.e and (not first or day.e < first.e or day.e == first.e and day.o < first.o) then
      first = day
    end
  end
  last = first.head
  advance(first)
end
last = sub(last, 1, 8)

local e, o = unpack_bytes('>I2I6', last)
local trim_e, trim_o = unpack_bytes('>I2I6', call('HGET', KEYS[2], ARGV[2]) or string.rep('\0', 8))
if e > trim_e or e == trim_e and o > trim_o then
  call('HSET', KEYS[2], ARGV[2], last)
end
local removed = 0
for i = 1, #days do
  removed = removed + call('ZREMRANGEBYLEX', days[i].key, '-', '(' .. last .. ABOVE)
end
return {0, removed, total - removed}
