-- Purpose: rows of one user in (after, up_to], day by day, under the server's clock (DESIGN-data §5, §18.1.2).
-- KEYS: 1 shard hash: epoch, and day_max by lane: lane byte -> records of 16 bytes: be32 UTC day ‖ be64 mailbox_seq ‖
--      be32 chunk
--   2 trim hash: tenant:user -> be64 user_trim_seq
-- ARGV: 1 shard_epoch  2 lane, one byte  3 tenant:user  4 mailbox key prefix, the UTC day follows
--   5 be64(after + 1)  6 be64(up_to + 1)  7 rows wanted of a day at most  8 bytes after which a day is read no further
-- RETURN: {0, user_trim_seq or nil, ttl_trim_frontier or nil, bound, rows of each day that has some, ...}.
--   bound nil: every row of the range is here; else a day was cut and rows above `bound` are incomplete.
--   {3}: a greater epoch is stored, {4}: a lower one.
-- Atomicity: one step, reads only. Touches ten day keys of this user and no other mailbox.
-- Complexity: O(log n + rows).

local call, sub, floor = redis.call, string.sub, math.floor
local FENCED, STALE, SLICE_ROWS = 3, 4, 64
local DAY_S, DAYS_KEPT = 86400, 8

local shard = call('HMGET', KEYS[1], 'epoch', ARGV[2])
local epoch, stored_epoch = tonumber(ARGV[1]), tonumber(shard[1] or 0)
if stored_epoch ~= epoch then
  return {stored_epoch > epoch and FENCED or STALE}
end
local now_s = tonumber(call('TIME')[1])
local frontier, frontier_e, frontier_o = false, -1, -1
local records = shard[2] or ''
for p = 1, #records, 16 do
  local day, e, o = struct.unpack('>I4I2I6', records, p)
  if (day + DAYS_KEPT) * DAY_S <= now_s and (e > frontier_e or e == frontier_e and o > frontier_o) then
    frontier, frontier_e, frontier_o = sub(records, p + 4, p + 11), e, o
  end
end
local reply = {0, call('HGET', KEYS[2], ARGV[3]), frontier, false}
local first, upper = '[' .. ARGV[5], '(' .. ARGV[6]
local rows_max, bytes_max = tonumber(ARGV[7]), tonumber(ARGV[8])
for day = floor(now_s / DAY_S) - DAYS_KEPT, floor(now_s / DAY_S) + 1 do
  local key, rows, bytes, from = ARGV[4] .. day, {}, 0, first
  repeat
    local want = math.min(SLICE_ROWS, rows_max - #rows)
    local slice = call('ZRANGEBYLEX', key, from, upper, 'LIMIT', '0', tostring(want))
    for i = 1, #slice do
      rows[#rows + 1] = slice[i]
      bytes = bytes + #slice[i]
    end
    local is_cut = #slice == want and (#rows >= rows_max or bytes >= bytes_max)
    if is_cut then -- later days are needed up to here only
      reply[4] = rows[#rows]
      upper = '[' .. reply[4]
    elseif #slice > 0 then
      from = '(' .. slice[#slice]
    end
  until is_cut or #slice < want
  if #rows > 0 then
    reply[#reply + 1] = rows
  end
end
return reply
