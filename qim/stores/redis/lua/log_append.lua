-- Purpose: append records of several producers to partitions of an embedded log, with dense offsets from 0, each producer
--   under its own fence (DESIGN-data §4).
-- KEYS: for each producer: hash {epoch} of its source partition; then for each partition: stream, counter of the next
--   offset
-- ARGV: 1 field name of a stream entry  2 number of producers, then for each: its epoch, "" = no fence; number of its
--   records; then for each record: index of its partition (0..), value
-- RETURN: for each producer the offsets of its records, in order, or an error: FENCED, a greater epoch is stored and
--   nothing of it was appended.
-- Atomicity: a producer's fence is checked before its first record. An XADD that fails (out of memory, a stream ahead of
--   its counter) ends its producer's run: the records before it are appended and counted, the error is its answer. Other
--   producers are not concerned.
-- Complexity: O(records). Offsets stay below 2^53.

local call, format = redis.call, string.format
local PRODUCERS = tonumber(ARGV[2])
local counters = {}
for key = PRODUCERS + 2, #KEYS, 2 do counters[#counters + 1] = KEYS[key] end
local next_offsets = call('MGET', unpack(counters))
local changed = {}

-- Append `count` records from argument `at` on; their offsets, or the error of the one that failed.
local function append(at, count)
  local offsets = {}
  for i = 1, count do
    local partition = tonumber(ARGV[at]) + 1
    local offset = tonumber(next_offsets[partition] or 0)
    local added = redis.pcall('XADD', KEYS[PRODUCERS + partition * 2 - 1], format('%.0f-0', offset + 1), ARGV[1], ARGV[at + 1])
    if added.err then return added end
    next_offsets[partition] = offset + 1
    changed[partition] = true
    offsets[i] = offset
    at = at + 2
  end
  return offsets
end

local replies, at = {}, 3
for producer = 1, PRODUCERS do
  local epoch, count = ARGV[at], tonumber(ARGV[at + 1])
  if epoch ~= '' and tonumber(call('HGET', KEYS[producer], 'epoch') or 0) > tonumber(epoch) then
    replies[producer] = redis.error_reply('FENCED a greater epoch is stored')
  else
    replies[producer] = append(at + 2, count)
  end
  at = at + 2 + 2 * count
end
local pairs_set = {}
for partition in pairs(changed) do
  pairs_set[#pairs_set + 1] = counters[partition]
  pairs_set[#pairs_set + 1] = format('%.0f', next_offsets[partition])
end
if #pairs_set > 0 then call('MSET', unpack(pairs_set)) end
return replies
