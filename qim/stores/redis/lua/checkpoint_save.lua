-- Purpose: move the fan-out position of an outbox partition forward (DESIGN-data §4).
-- KEYS: 1 checkpoint hash {epoch, grant, next, log}
-- ARGV: 1 fanout_epoch  2 next offset
-- RETURN: 0; error FENCED: a greater epoch is stored, NOTOPEN: a lower one. Nothing written then.
-- Atomicity: one step, one write. Idempotent; a smaller offset changes nothing.
-- Complexity: O(1).

local stored = redis.call('HMGET', KEYS[1], 'epoch', 'next')
local epoch = tonumber(stored[1] or 0)
if epoch ~= tonumber(ARGV[1]) then
  return redis.error_reply((epoch > tonumber(ARGV[1]) and 'FENCED' or 'NOTOPEN') .. ' epoch ' .. epoch .. ' is stored')
end
if tonumber(ARGV[2]) > tonumber(stored[2] or 0) then
  redis.call('HSET', KEYS[1], 'next', ARGV[2])
end
return 0
