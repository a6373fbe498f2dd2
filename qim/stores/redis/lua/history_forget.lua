-- Purpose: drop the oldest records of a conversation and raise its earliest_available_conversation_seq (§18.3.4).
-- KEYS: 1 fence  2 conversation hash: seq, earliest
-- ARGV: 1 fencing_epoch  2 record key prefix, the seq bucket follows  3 earliest sequence to keep
--   4 records to drop at most by this call
-- RETURN: earliest_available_conversation_seq as it is now; errors FENCED (a greater epoch is stored) and NOTOPEN (a
--   lower one): nothing written.
-- Atomicity: one step; the bound rises before records go, so that it is true whatever fails. Never falls, never passes
--   the sequence after the latest. Idempotent.
-- Complexity: O(records dropped).

local call, floor = redis.call, math.floor
local RECORDS_PER_BUCKET = 4096
local stored, epoch = tonumber(call('HGET', KEYS[1], 'epoch') or 0), tonumber(ARGV[1])
if stored > epoch then return redis.error_reply('FENCED epoch ' .. stored .. ' is stored') end
if stored < epoch then return redis.error_reply('NOTOPEN epoch ' .. stored .. ' is stored') end

local row = call('HMGET', KEYS[2], 'seq', 'earliest')
local latest, earliest = tonumber(row[1] or 0), tonumber(row[2] or 1)
local keep = math.min(tonumber(ARGV[3]), latest + 1, earliest + tonumber(ARGV[4]))
if keep <= earliest then return earliest end
call('HSET', KEYS[2], 'earliest', string.format('%.0f', keep))
for seq = earliest, keep - 1 do
  call('HDEL', ARGV[2] .. floor(seq / RECORDS_PER_BUCKET), string.format('%.0f', seq))
end
return keep
