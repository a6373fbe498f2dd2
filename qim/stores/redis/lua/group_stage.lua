-- Purpose: write initial members of a group that is not published yet, unseen by readers (DESIGN-data §8).
-- KEYS: 1 fence  2 group
-- ARGV: 1 "{bNNNN}:<tenant>:<group>"  2 fencing_epoch  3 "1" to drop what an abandoned creation left
--   4 lifetime of staged keys (s)  5 number of members, then for each: user, slot, mailbox shard
-- RETURN: 1; errors FENCED, NOTOPEN, PUBLISHED: nothing written.
-- Atomicity: all checks first; the first HSET is the only command that can fail (out of memory). May be repeated.
-- Complexity: O(members), at most 1,000 a call so that the server is never blocked for long.

local NAME, EPOCH, LIFETIME = ARGV[1], tonumber(ARGV[2]), ARGV[4]
local FOREVER = '\0\0\0\0\0\0\0\0\127\255\255\255\255\255\255\255'
local slots_key, intervals_key = 'stage:grpslot:' .. NAME, 'stage:grpmember:' .. NAME
local users_key, shards_key = 'stage:grpusers:' .. NAME .. ':', 'stage:grpshards:' .. NAME

local stored = tonumber(redis.call('HGET', KEYS[1], 'epoch') or 0)
if stored > EPOCH then return redis.error_reply('FENCED epoch ' .. stored .. ' is stored') end
if stored < EPOCH then return redis.error_reply('NOTOPEN epoch ' .. stored .. ' is stored') end
if redis.call('EXISTS', KEYS[2]) == 1 then return redis.error_reply('PUBLISHED the group exists') end

if ARGV[3] == '1' then
  for _, shard in ipairs(redis.call('SMEMBERS', shards_key)) do
    redis.call('UNLINK', users_key .. shard)
  end
  redis.call('UNLINK', slots_key, intervals_key, shards_key)
end
local slots, intervals, users, shards = {}, {}, {}, {}
local at = 6
for _ = 1, tonumber(ARGV[5]) do
  local user, slot, shard = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  slots[#slots + 1], slots[#slots + 2] = user, slot
  intervals[#intervals + 1], intervals[#intervals + 2] = user, FOREVER
  if not users[shard] then
    users[shard] = {}
    shards[#shards + 1] = shard
  end
  local row = users[shard]
  row[#row + 1], row[#row + 2] = slot, user
  at = at + 3
end
redis.call('HSET', slots_key, unpack(slots))
redis.call('HSET', intervals_key, unpack(intervals))
redis.call('SADD', shards_key, unpack(shards))
for shard, row in pairs(users) do
  redis.call('HSET', users_key .. shard, unpack(row))
  redis.call('EXPIRE', users_key .. shard, LIFETIME)
end
for _, key in ipairs({slots_key, intervals_key, shards_key}) do
  redis.call('EXPIRE', key, LIFETIME)
end
return 1
