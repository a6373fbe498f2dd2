-- Purpose: drop superseded membership versions of a group and write down the current one with the time (§7.9, §10.4.3).
-- KEYS: 1 fence  2 group hash: version, low, mark, mark_at  3 version indexes
-- ARGV: 1 fencing_epoch  2 lowest version stored, as the caller found it  3 lowest version stored afterwards
--   4 version to mark, "" = the mark stays  5 time of the mark (unix ms)  6 key prefix of the version snapshots, the
--   mailbox shard follows; then pairs: mailbox shard, snapshot version that no version from 3 on refers to
-- RETURN: versions dropped: 0 when another call came first; errors FENCED and NOTOPEN: nothing written.
-- Atomicity: one step; the first HSET is the only command that can fail. Never drops the current version.
-- Complexity: O(versions and snapshots dropped).

local call = redis.call
local stored, epoch = tonumber(call('HGET', KEYS[1], 'epoch') or 0), tonumber(ARGV[1])
if stored > epoch then return redis.error_reply('FENCED epoch ' .. stored .. ' is stored') end
if stored < epoch then return redis.error_reply('NOTOPEN epoch ' .. stored .. ' is stored') end

local row = call('HMGET', KEYS[2], 'version', 'low')
local low, keep = tonumber(row[2] or 1), tonumber(ARGV[3])
if not row[1] or low ~= tonumber(ARGV[2]) or keep > tonumber(row[1]) then return 0 end
if ARGV[4] == '' then
  call('HSET', KEYS[2], 'low', ARGV[3])
else
  call('HSET', KEYS[2], 'low', ARGV[3], 'mark', ARGV[4], 'mark_at', ARGV[5])
end
for version = low, keep - 1 do
  call('HDEL', KEYS[3], string.format('%.0f', version))
end
for at = 7, #ARGV, 2 do
  call('HDEL', ARGV[6] .. ARGV[at], ARGV[at + 1])
end
return keep - low
