-- Purpose: take the fan-out position of an outbox partition: raise its stored epoch, read where to go on (DESIGN-data §4).
-- KEYS: 1 checkpoint hash {epoch, grant, next, log}
-- ARGV: 1 fanout_epoch  2 grant id: the same grant may open again  3 identity of the topic the position belongs to
-- RETURN: next offset, decimal; errors FENCED (a greater epoch, or the same one of another grant) and LOGCHANGED (the
--   position belongs to another topic): nothing written.
-- Atomicity: one step; all checks come first, one write. Idempotent for the same grant.
-- Complexity: O(1).

local stored = redis.call('HMGET', KEYS[1], 'epoch', 'grant', 'next', 'log')
local epoch = tonumber(stored[1] or 0)
if epoch > tonumber(ARGV[1]) or (epoch == tonumber(ARGV[1]) and stored[2] ~= ARGV[2]) then
  return redis.error_reply('FENCED epoch ' .. epoch .. ' is stored')
end
if stored[4] and stored[4] ~= ARGV[3] then
  return redis.error_reply('LOGCHANGED the position belongs to ' .. stored[4])
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'grant', ARGV[2], 'log', ARGV[3])
return stored[3] or '0'
