-- Purpose: write where an epoch of a mailbox shard begins in the log (§7.11), for the owner of this epoch only.
-- KEYS: 1 hash epoch -> boundary  2 hash id -> "<epoch> <owner> <grant id>"
-- ARGV: 1 shard  2 epoch  3 boundary
-- RETURN: the boundary stored under this epoch, which is another one if the epoch had one; error FENCED: the registry
--   has granted the shard under another epoch since. Nothing written then.
-- Atomicity: one step, one write. Idempotent.
-- Complexity: O(1).

local lease = redis.call('HGET', KEYS[2], ARGV[1])
if not lease or string.match(lease, '^(%d+) ') ~= ARGV[2] then
  return redis.error_reply('FENCED the registry has ' .. (lease or 'no lease'))
end
redis.call('HSETNX', KEYS[1], ARGV[2], ARGV[3])
return redis.call('HGET', KEYS[1], ARGV[2])
