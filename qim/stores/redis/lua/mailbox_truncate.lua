-- Purpose: delete the entries of one user up to a sequence and raise user_trim_seq (§18.1.2).
-- KEYS: 1 shard hash {epoch}  2 trim hash: tenant:user -> be64 user_trim_seq
-- ARGV: 1 shard_epoch  2 tenant:user  3 mailbox key prefix, the UTC day follows  4 be64(seq)  5 be64(seq + 1)
-- RETURN: 0 done, 3 a greater epoch is stored, 4 a lower one; not 0: nothing was written.
-- Atomicity: one step. Idempotent; a smaller seq than the stored one deletes nothing new and lowers nothing.
-- Complexity: O(log n + entries deleted).

local call, unpack_bytes, floor = redis.call, struct.unpack, math.floor
local FENCED, STALE = 3, 4
local DAY_S, DAYS_KEPT = 86400, 8

local epoch, stored_epoch = tonumber(ARGV[1]), tonumber(call('HGET', KEYS[1], 'epoch') or 0)
if stored_epoch ~= epoch then
  return stored_epoch > epoch and FENCED or STALE
end
local e, o = unpack_bytes('>I2I6', ARGV[4])
local trim_e, trim_o = unpack_bytes('>I2I6', call('HGET', KEYS[2], ARGV[2]) or string.rep('\0', 8))
if e > trim_e or e == trim_e and o > trim_o then
  call('HSET', KEYS[2], ARGV[2], ARGV[4])
end
local today = floor(tonumber(call('TIME')[1]) / DAY_S)
for day = today - DAYS_KEPT, today + 1 do
  call('ZREMRANGEBYLEX', ARGV[3] .. day, '-', '(' .. ARGV[5])
end
return 0
