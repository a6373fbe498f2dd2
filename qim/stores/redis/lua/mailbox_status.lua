-- Purpose: what a login needs of one user: W of the lane, both trims, size of (after, W] (DESIGN-data §7).
-- KEYS: 1 shard hash: epoch, watermarks (W: lane_count big-endian u64), and day_max by lane: lane byte -> records of
--      16 bytes: be32 UTC day ‖ be64 mailbox_seq ‖ be32 chunk
--   2 trim hash: tenant:user -> be64 user_trim_seq
-- ARGV: 1 shard_epoch  2 lane, one byte  3 tenant:user  4 mailbox key prefix, the UTC day follows  5 be64(after + 1)
-- RETURN: {0, W of the lane, user_trim_seq or nil, ttl_trim_frontier or nil, entries, bytes (estimate: the newest entry
--   of each day times the day's count)}; {3}: a greater epoch is stored, {4}: a lower one.
-- Atomicity: one step, reads only. Touches ten day keys of this user.
-- Complexity: O(log n).

local call, sub, floor = redis.call, string.sub, math.floor
local FENCED, STALE = 3, 4
local DAY_S, DAYS_KEPT = 86400, 8

local shard = call('HMGET', KEYS[1], 'epoch', 'watermarks', ARGV[2])
local epoch, stored_epoch = tonumber(ARGV[1]), tonumber(shard[1] or 0)
if stored_epoch ~= epoch then
  return {stored_epoch > epoch and FENCED or STALE}
end
local at = 8 * string.byte(ARGV[2])
local watermark = sub(shard[2], at + 1, at + 8)
local now_s = tonumber(call('TIME')[1])
local frontier, frontier_e, frontier_o = false, -1, -1
local records = shard[3] or ''
for p = 1, #records, 16 do
  local day, e, o = struct.unpack('>I4I2I6', records, p)
  if (day + DAYS_KEPT) * DAY_S <= now_s and (e > frontier_e or e == frontier_e and o > frontier_o) then
    frontier, frontier_e, frontier_o = sub(records, p + 4, p + 11), e, o
  end
end
-- A longer string sorts above its prefix: 9 bytes of 0xff after W are above every member whose mailbox_seq is W.
local first, last = '[' .. ARGV[5], '(' .. watermark .. string.rep('\255', 9)
local entries, bytes = 0, 0
for day = floor(now_s / DAY_S) - DAYS_KEPT, floor(now_s / DAY_S) + 1 do
  local key = ARGV[4] .. day
  local count = call('ZLEXCOUNT', key, first, last)
  if count > 0 then
    entries = entries + count
    bytes = bytes + count * #call('ZREVRANGEBYLEX', key, last, first, 'LIMIT', '0', '1')[1]
  end
end
return {0, watermark, call('HGET', KEYS[2], ARGV[3]), frontier, entries, bytes}
