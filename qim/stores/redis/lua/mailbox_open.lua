-- Purpose: take a mailbox shard: raise its stored epoch, make W if there is none, read where to go on (DESIGN-data §6).
-- KEYS: 1 shard hash {epoch, grant, watermarks, fold, fold_offset}
-- ARGV: 1 shard_epoch  2 grant id: the same grant may open again  3 a W of zeros
-- RETURN: {epoch now stored, grant now stored, W, fold or nil, fold_offset or nil}; not the caller's epoch and grant: it
--   is fenced and nothing was written.
-- Atomicity: one step. Idempotent. The first write is the only one that can fail.
-- Complexity: O(1).

local stored = redis.call('HMGET', KEYS[1], 'epoch', 'grant')
local epoch, grant = tonumber(stored[1] or 0), stored[2]
if epoch < tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'grant', ARGV[2])
  redis.call('HSETNX', KEYS[1], 'watermarks', ARGV[3])
  epoch, grant = tonumber(ARGV[1]), ARGV[2]
end
local state = redis.call('HMGET', KEYS[1], 'watermarks', 'fold', 'fold_offset')
return {epoch, grant, state[1], state[2], state[3]}
