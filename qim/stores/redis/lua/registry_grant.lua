-- Purpose: grant leases of one kind to an owner, each with its epoch + 1 (DESIGN-data §6).
-- KEYS: 1 hash id -> "<epoch> <owner> <grant id>"  2 version of the route map
-- ARGV: 1 owner  2 grant id: ids that already have it keep their epoch  3 greatest epoch there may be, then the ids
-- RETURN: epoch of each id, in order; error EXHAUSTED <id>: an epoch would pass the greatest, nothing was granted.
-- Atomicity: all checks come first; the first write is the only one that can fail.
-- Complexity: O(ids).

local epochs, writes, last = {}, {}, tonumber(ARGV[3])
for i = 4, #ARGV do
  local stored = redis.call('HGET', KEYS[1], ARGV[i])
  local epoch, grant = 0, nil
  if stored then
    local epoch_text, _, grant_text = string.match(stored, '^(%d+) (%S+) (%S+)$')
    epoch, grant = tonumber(epoch_text), grant_text
  end
  if grant ~= ARGV[2] then
    epoch = epoch + 1
    if epoch > last then
      return redis.error_reply('EXHAUSTED ' .. ARGV[i])
    end
    writes[#writes + 1] = ARGV[i]
    writes[#writes + 1] = string.format('%.0f %s %s', epoch, ARGV[1], ARGV[2])
  end
  epochs[#epochs + 1] = epoch
end
if #writes > 0 then
  redis.call('HSET', KEYS[1], unpack(writes))
  redis.call('INCR', KEYS[2])
end
return epochs
