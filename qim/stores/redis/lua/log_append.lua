-- Purpose: append records to partitions of an embedded log, with dense offsets from 0, under a producer's fence
--   (DESIGN-data §4).
-- KEYS: 1 hash {epoch} of the producer's source partition, then for each partition: stream, counter of the next offset
-- ARGV: 1 the producer's epoch, "" = no fence  2 field name of a stream entry, then for each record: index of its
--   partition (0..), value
-- RETURN: offset of each record, in order; error FENCED: a greater epoch is stored.
-- Atomicity: the fence is checked first. An XADD that fails (out of memory, a stream ahead of its counter) ends the call:
--   the records before it are appended and counted, the error is returned.
-- Complexity: O(records). Offsets stay below 2^53.

local call, format = redis.call, string.format
if ARGV[1] ~= '' and tonumber(call('HGET', KEYS[1], 'epoch') or 0) > tonumber(ARGV[1]) then
  return redis.error_reply('FENCED a greater epoch is stored')
end
local next_offsets, offsets, failure = {}, {}, nil
for i = 3, #ARGV, 2 do
  local partition = tonumber(ARGV[i])
  local stream, counter = KEYS[2 + 2 * partition], KEYS[3 + 2 * partition]
  local offset = next_offsets[partition] or tonumber(call('GET', counter) or 0)
  local added = redis.pcall('XADD', stream, format('%.0f-0', offset + 1), ARGV[2], ARGV[i + 1])
  if added.err then
    failure = added
    break
  end
  next_offsets[partition] = offset + 1
  offsets[#offsets + 1] = offset
end
for partition, offset in pairs(next_offsets) do
  call('SET', KEYS[3 + 2 * partition], format('%.0f', offset))
end
return failure or offsets
