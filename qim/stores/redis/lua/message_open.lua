-- Purpose: raise the fence of a conversation bucket to a new grant and return where its writer starts (DESIGN-data §3).
-- KEYS: 1 fence  2 hlc  3 next outbox offset
-- ARGV: 1 fencing_epoch  2 grant id
-- RETURN: {greatest message_id or nil, next outbox offset or nil}; error FENCED if a greater epoch, or the same one of
--   another grant, is stored.
-- Atomicity: one write after all checks; the same grant may be repeated.
-- Complexity: O(1).

local row = redis.call('HMGET', KEYS[1], 'epoch', 'grant')
local stored = tonumber(row[1] or 0)
local epoch = tonumber(ARGV[1])
if stored > epoch or (stored == epoch and row[2] ~= ARGV[2]) then
  return redis.error_reply('FENCED epoch ' .. stored .. ' is stored')
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'grant', ARGV[2])
return {redis.call('GET', KEYS[2]), redis.call('GET', KEYS[3])}
