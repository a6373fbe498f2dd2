-- Purpose: make version 1 of a staged group visible and append the record that announces it (DESIGN-data §8).
-- KEYS: 1 fence  2 hlc  3 outbox stream  4 next outbox offset  5 group
-- ARGV: 1 "{bNNNN}:<tenant>:<group>"  2 fencing_epoch  3 message_id[16]  4 outbox record without conversation_seq
--   5 membership_version  6 member_count  7 next_slot  8 creator  9 create digest[16]  10 index
--   11 number of snapshots, then for each: mailbox shard, snapshot
-- RETURN: offset of the outbox record, or nil if the group exists (nothing written). Errors, nothing written: FENCED,
--   NOTOPEN, STAGED (not exactly the members of this creation are staged), IDORDER (message_id not above the bucket's).
-- Atomicity: all checks first; XADD is the first write and the only one that can fail.
-- Complexity: O(mailbox shards): staged hashes are renamed, not copied. Ids are compared as words.

local NAME, EPOCH, ID = ARGV[1], tonumber(ARGV[2]), ARGV[3]

local function greater(a, b)
  local a1, a2, a3, a4 = struct.unpack('>I4I4I4I4', a)
  local b1, b2, b3, b4 = struct.unpack('>I4I4I4I4', b)
  if a1 ~= b1 then return a1 > b1 end
  if a2 ~= b2 then return a2 > b2 end
  if a3 ~= b3 then return a3 > b3 end
  return a4 > b4
end

local stored = tonumber(redis.call('HGET', KEYS[1], 'epoch') or 0)
if stored > EPOCH then return redis.error_reply('FENCED epoch ' .. stored .. ' is stored') end
if stored < EPOCH then return redis.error_reply('NOTOPEN epoch ' .. stored .. ' is stored') end
if redis.call('EXISTS', KEYS[5]) == 1 then return nil end
for _, kind in ipairs({'grpslot:', 'grpmember:'}) do
  local staged = redis.call('HLEN', 'stage:' .. kind .. NAME)
  if staged ~= tonumber(ARGV[6]) then
    return redis.error_reply('STAGED ' .. staged .. ' of ' .. ARGV[6] .. ' members are staged')
  end
end
local hlc = redis.call('GET', KEYS[2])
if hlc and not greater(ID, hlc) then return redis.error_reply('IDORDER message_id is not above the stored one') end
local shards = redis.call('SMEMBERS', 'stage:grpshards:' .. NAME)
local offset = tonumber(redis.call('GET', KEYS[4]) or 0)

redis.call('XADD', KEYS[3], string.format('%.0f-0', offset + 1), 'r', '\9' .. string.rep('\0', 8) .. ARGV[4])
redis.call('SET', KEYS[4], offset + 1)
redis.call('SET', KEYS[2], ID)
local function publish(key)
  redis.call('RENAME', 'stage:' .. key, key)
  redis.call('PERSIST', key)
end
publish('grpslot:' .. NAME)
publish('grpmember:' .. NAME)
for _, shard in ipairs(shards) do
  publish('grpusers:' .. NAME .. ':' .. shard)
end
redis.call('UNLINK', 'stage:grpshards:' .. NAME)
local at = 12
for _ = 1, tonumber(ARGV[11]) do
  redis.call('HSET', 'grpver:' .. NAME .. ':' .. ARGV[at], ARGV[5], ARGV[at + 1])
  at = at + 2
end
redis.call('HSET', 'grpidx:' .. NAME, ARGV[5], ARGV[10])
redis.call('HSET', KEYS[5], 'version', ARGV[5], 'count', ARGV[6], 'next_slot', ARGV[7], 'creator', ARGV[8],
  'digest', ARGV[9])
return offset
