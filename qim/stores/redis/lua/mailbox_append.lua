-- Purpose: append chunks of dispatches to personal mailboxes, set their progress bits, move W and save the fold, in one
--   step (DESIGN-data §5).
-- KEYS: 1 shard hash: epoch, grant, watermarks (W: lane_count big-endian u64), fold, fold_offset,
--      low (lowest progress block that may still exist), and day_max by lane:
--      lane byte -> records of 16 bytes, last appended day first: be32 UTC day ‖ be64 mailbox_seq ‖ be32 chunk
--   2.. progress hashes of the blocks of 1,024 offsets this call names:
--      be48 offset -> be32 chunk_size ‖ be64 mask of the lanes whose only chunk is done ‖ be64 mask of those with a row:
--      be48 offset ‖ u8 lane -> be32 chunk_size ‖ be32 chunk_count ‖ be32 done ‖ bitmap (chunk k = bit k%8 of byte k/8)
-- ARGV: 1 shard_epoch  2 W the caller believes in, "" = W does not move  3 new W
--   4 what must be complete, 21 bytes each: be48 offset ‖ u8 lane (255: those of the mask, each of one chunk) ‖
--      be16 (KEYS index - 2) ‖ be64 mask ‖ be32 chunk_count
--   5 UTC days of the items, be32 each  6 number of items, then for each item:
--      header: be48 offset ‖ be64 mailbox_seq ‖ be32 chunk ‖ be32 chunk_size ‖ be32 chunk_count ‖ be64 mask of its lanes ‖
--         be16 (KEYS index - 2) ‖ u8 index into 5 ‖ u8 1 = keys may be new and then get their expiry ‖ be16 b ‖
--         be16 recipients, and for each lane u8 lane ‖ be16 recipients of it; several lanes only if chunk_count is 1
--      common; if b > 0: conversation id, its first-seen value, b user_conversation_state keys to register it in
--      for each recipient, lane by lane: mailbox key ending in the day, u8 ordinal ‖ event_id[8] ‖ ref
--   optional, last: fold, its offset C, progress key prefix: at most 64 blocks wholly below C are dropped
-- RETURN: {status, items applied, entries refused}; status 0 done, 1 W or a required row is not as told, 2 other chunk
--   size or count stored, 3 a greater epoch stored, 4 a lower one. Not 0: nothing was written.
-- Atomicity: all checks come first; only the first write can fail (out of memory). Idempotent by (offset, lane, chunk).
--   Expects that a user has one lane, and that within a row (user, ordinal, event_id) is unique.
-- Complexity: O(log n) per entry, n = entries of that user and day; entries are probed for a different member under
--   their 17-byte prefix only if day_max does not prove that this chunk was never appended. Entries of one user in items
--   for several go in one ZADD.
-- Half of an entry is this file, not ZADD: measure before and after any change.

local call, unpack_bytes, pack_bytes = redis.call, struct.unpack, struct.pack
local sub, byte, char, rep, floor = string.sub, string.byte, string.char, string.rep, math.floor
local band, bor, bnot = bit.band, bit.bor, bit.bnot
local OK, W_MOVED, CHUNK_SIZE, FENCED, STALE = 0, 1, 2, 3, 4
local SHARD, BLOCK_0, FIRST_ITEM, LANES_AT, VALUES_PER_READ, DROPS_PER_CALL = KEYS[1], 2, 7, 43, 1000, 64
local DAY_S, DAYS_KEPT = 86400, 8 -- mailbox_retention_days + 1: the day itself is kept whole (§18.3.3)
local NO_DAY, ONE, NO_LANES, WHOLE, MEMBERS_PER_ZADD = '\255\255\255\255', '\0\0\0\1', '\0\0\0\0\0\0\0\0', 255, 256
local COUNT = tonumber(ARGV[6])

-- What the call names: items, progress rows by block, lanes.
local items, rows, block_rows, lanes, shard_fields, at, n = {}, {}, {}, {}, {'epoch', 'watermarks'}, FIRST_ITEM, 0
local function want(key, block)
  if rows[key] == nil then
    rows[key] = false
    local list = block_rows[block]
    if list then
      n = list[0] + 1
      list[0], list[n] = n, key
    else
      block_rows[block] = {[0] = 1, key}
    end
  end
end
for i = 1, COUNT do
  local header = ARGV[at]
  local item = {unpack_bytes('>c6c12c4c4c8I2BBI2I2', header)}
  items[i], item[11], item[12] = item, at, header
  want(item[1], item[6])
  if item[4] ~= ONE then
    want(item[1] .. sub(header, LANES_AT, LANES_AT), item[6])
  end
  for p = LANES_AT, #header, 3 do
    local lane = sub(header, p, p)
    if not lanes[lane] then
      lanes[lane] = true
      shard_fields[#shard_fields + 1] = lane
    end
  end
  at = at + 2 + 2 * item[10]
  if item[9] > 0 then
    at = at + 2 + item[9]
  end
end
local required = ARGV[4]
for p = 1, #required, 21 do
  local offset, lane, block = unpack_bytes('>c6BI2', required, p)
  want(lane == WHOLE and offset or offset .. char(lane), block)
end

-- What is stored of it.
local shard = call('HMGET', SHARD, unpack(shard_fields))
local epoch, stored_epoch = tonumber(ARGV[1]), tonumber(shard[1] or 0)
if stored_epoch ~= epoch then
  return {stored_epoch > epoch and FENCED or STALE, 0, 0}
end
if ARGV[2] ~= '' and shard[2] ~= ARGV[2] then
  return {W_MOVED, 0, 0}
end
for block, list in pairs(block_rows) do
  for first = 1, list[0], VALUES_PER_READ do
    local last = math.min(first + VALUES_PER_READ - 1, list[0])
    local values = call('HMGET', KEYS[BLOCK_0 + block], unpack(list, first, last))
    for i = first, last do
      rows[list[i]] = values[i - first + 1]
    end
  end
end

-- Judge the items one after another; nothing is written yet.
local applied, applied_count, row_writes = {}, 0, {}
local function set_row(key, block, row)
  rows[key] = row
  local writes = row_writes[block]
  if writes then
    n = writes[0]
    writes[0], writes[n + 1], writes[n + 2] = n + 2, key, row
  else
    row_writes[block] = {[0] = 2, key, row}
  end
end

-- Lanes with one chunk each: false if something else is stored, nil if all are done. Some done: item[13] are the others.
local function judge_whole(item)
  local key, size, mask = item[1], item[3], item[5]
  local row = rows[key]
  if not row then
    set_row(key, item[6], size .. mask .. NO_LANES)
    return true
  end
  local w1, w2, s1, s2 = unpack_bytes('>I4I4I4I4', row, 5)
  local m1, m2 = unpack_bytes('>I4I4', mask)
  if sub(row, 1, 4) ~= size or band(m1, s1) ~= 0 or band(m2, s2) ~= 0 then
    return false
  end
  local new1, new2 = band(m1, bnot(w1)), band(m2, bnot(w2))
  if new1 == 0 and new2 == 0 then
    return nil
  end
  if band(m1, w1) ~= 0 or band(m2, w2) ~= 0 then
    item[13] = {new1, new2}
  end
  set_row(key, item[6], size .. pack_bytes('>I4I4', bor(w1, m1), bor(w2, m2)) .. sub(row, 13))
  return true
end

-- A chunk of a lane that has several.
local function judge_chunk(item)
  local offset, size, count, block = item[1], item[3], item[4], item[6]
  local key = offset .. sub(item[12], LANES_AT, LANES_AT)
  local row, spec, chunk = rows[key], size .. count, unpack_bytes('>I4', item[2], 9)
  local at_byte, mask = 13 + floor(chunk / 8), 2 ^ (chunk % 8)
  local shared = rows[offset] or size .. NO_LANES .. NO_LANES
  local w1, w2, s1, s2 = unpack_bytes('>I4I4I4I4', shared, 5)
  local m1, m2 = unpack_bytes('>I4I4', item[5])
  if sub(shared, 1, 4) ~= size or band(m1, w1) ~= 0 or band(m2, w2) ~= 0 or row and sub(row, 1, 8) ~= spec then
    return false
  end
  if row then
    local bits = byte(row, at_byte)
    if band(bits, mask) ~= 0 then
      return nil
    end
    row = spec .. pack_bytes('>I4', unpack_bytes('>I4', row, 9) + 1) .. sub(row, 13, at_byte - 1)
      .. char(bits + mask) .. sub(row, at_byte + 1)
  else
    local bytes = floor((unpack_bytes('>I4', count) + 7) / 8)
    row = spec .. ONE .. rep('\0', at_byte - 13) .. char(mask) .. rep('\0', bytes - at_byte + 12)
  end
  set_row(key, block, row)
  if band(m1, s1) == 0 and band(m2, s2) == 0 then
    set_row(offset, block, sub(shared, 1, 12) .. pack_bytes('>I4I4', bor(s1, m1), bor(s2, m2)))
  end
  return true
end

for i = 1, COUNT do
  local item = items[i]
  local is_new
  if item[4] == ONE then
    is_new = judge_whole(item)
  else
    is_new = judge_chunk(item)
  end
  if is_new == false then
    return {CHUNK_SIZE, 0, 0}
  elseif is_new then
    applied_count = applied_count + 1
    applied[applied_count] = item
  end
end
for p = 1, #required, 21 do
  local offset, lane, block, m1, m2, count = unpack_bytes('>c6BI2I4I4c4', required, p)
  if lane ~= WHOLE then
    local row = rows[offset .. char(lane)]
    if not row or sub(row, 5, 12) ~= count .. count then
      return {W_MOVED, 0, 0}
    end
  else
    local row = rows[offset]
    local w1, w2 = unpack_bytes('>I4I4', row and sub(row, 5, 12) or NO_LANES)
    local missing = {[0] = band(m2, bnot(w2)), [32] = band(m1, bnot(w1))}
    for first, bits in pairs(missing) do
      for k = 0, bits ~= 0 and 31 or -1 do
        -- Until they are dropped, rows from before there were masks: a lane with one chunk had one of its own.
        if band(bits, bit.lshift(1, k)) ~= 0 then
          row = call('HGET', KEYS[BLOCK_0 + block], offset .. char(first + k))
          if not row or sub(row, 5, 12) ~= ONE .. ONE then
            return {W_MOVED, 0, 0}
          end
        end
      end
    end
  end
end

-- Write.
for block, writes in pairs(row_writes) do
  call('HSET', KEYS[BLOCK_0 + block], unpack(writes, 1, writes[0]))
end
local refused, shard_writes = 0, {}
if applied_count > 0 then
  local now_s = tonumber(call('TIME')[1])
  local today, days = floor(now_s / DAY_S), {}
  for p = 1, #ARGV[5], 4 do
    local day, other = unpack_bytes('>I4', ARGV[5], p), nil
    if day > today + 1 then -- readers look no further ahead; a clock that is days ahead must not hide entries
      day, other = today + 1, {-#tostring(day) - 1, today + 1}
    end
    local expires_s = (day + DAYS_KEPT) * DAY_S
    days[#days + 1] = {pack_bytes('>I4', day), expires_s, expires_s <= now_s, other}
  end
  for i = 3, #shard_fields do -- {day of the first record, its epoch, offset, chunk, its 12 bytes, the other records}
    local records = shard[i]
    if records then
      local day, e, o, c = unpack_bytes('>c4I2I6I4', records)
      lanes[shard_fields[i]] = {day, e, o, c, sub(records, 5, 16), sub(records, 17)}
    else
      lanes[shard_fields[i]] = {NO_DAY, 0, 0, 0, '', ''}
    end
  end

  -- Make `day` the first record of the lane. A day met for the first time turns what has expired into one record of
  -- day 0, so the list stays as short as the retention.
  local function turn_to_day(lane, day)
    local records = (lane[1] == NO_DAY and '' or lane[1] .. lane[5]) .. lane[6]
    for p = 1, #records, 16 do
      if sub(records, p, p + 3) == day then
        local e, o, c = unpack_bytes('>I2I6I4', records, p + 4)
        lane[1], lane[2], lane[3], lane[4] = day, e, o, c
        lane[5], lane[6] = sub(records, p + 4, p + 15), sub(records, 1, p - 1) .. sub(records, p + 16)
        return
      end
    end
    local kept, gone, gone_e, gone_o = '', '', -1, -1
    for p = 1, #records, 16 do
      local d, e, o = unpack_bytes('>I4I2I6', records, p)
      if (d + DAYS_KEPT) * DAY_S > now_s then
        kept = kept .. sub(records, p, p + 15)
      elseif e > gone_e or e == gone_e and o > gone_o then
        gone, gone_e, gone_o = '\0\0\0\0' .. sub(records, p + 4, p + 15), e, o
      end
    end
    lane[1], lane[2], lane[3], lane[4], lane[5], lane[6] = day, -1, 0, 0, '', kept .. gone
  end

  -- Entries of users that may get more of them in this call: member, or list of ZADD arguments, by mailbox key.
  local gathered = {}
  local function gather(mailbox, member)
    local held = gathered[mailbox]
    if not held then
      gathered[mailbox] = member
    elseif type(held) == 'string' then
      gathered[mailbox] = {'0', held, '0', member}
    else
      n = #held
      held[n + 1], held[n + 2] = '0', member
      if n >= MEMBERS_PER_ZADD then
        call('ZADD', mailbox, unpack(held))
        gathered[mailbox] = nil
      end
    end
  end

  -- Write the entries of `count` recipients from ARGV[p] on.
  local function write(item, day, common, is_above, p, count)
    local seq, other, may_be_new = sub(item[2], 1, 8), day[4], item[8] == 1
    local alone = COUNT == 1 or item[10] == 1 or item[4] ~= ONE or may_be_new or not is_above
    for r = p, p + 2 * count - 2, 2 do
      local mailbox, member = ARGV[r], seq .. ARGV[r + 1] .. common
      if other then
        mailbox = sub(mailbox, 1, other[1]) .. other[2]
      end
      if not alone then
        gather(mailbox, member)
      else
        local found = not is_above
          and call('ZRANGEBYLEX', mailbox, '[' .. sub(member, 1, 17), '+', 'LIMIT', '0', '1')[1]
        if found and found ~= member and sub(found, 1, 17) == sub(member, 1, 17) then
          refused = refused + 1
        else
          call('ZADD', mailbox, '0', member)
          if may_be_new then
            call('EXPIREAT', mailbox, tostring(day[2]), 'NX')
          end
        end
      end
    end
  end

  for k = 1, applied_count do
    local item = applied[k]
    local header, day, registered, p, only = item[12], days[item[7] + 1], item[9], item[11], item[13]
    local common = ARGV[p + 1]
    p = p + 2
    if registered > 0 then
      for r = p + 2, p + 1 + registered do
        call('HSETNX', ARGV[r], ARGV[p], ARGV[p + 1])
      end
      p = p + 2 + registered
    end
    local e, o, c = unpack_bytes('>I2I6I4', item[2])
    local is_above, ranges = true, only and {} or nil
    for q = LANES_AT, #header, 3 do
      local name = sub(header, q, q)
      local lane, number = lanes[name], only and byte(name)
      if not only or band(only[number < 32 and 2 or 1], bit.lshift(1, number % 32)) ~= 0 then
        if lane[1] ~= day[1] then
          turn_to_day(lane, day[1])
        end
        if e > lane[2] or e == lane[2] and (o > lane[3] or o == lane[3] and c > lane[4]) then
          lane[2], lane[3], lane[4], lane[5] = e, o, c, item[2]
        else
          is_above = false
        end
        if only then
          ranges[#ranges + 1] = {p, unpack_bytes('>I2', header, q + 1)}
        end
      end
      if only then
        p = p + 2 * unpack_bytes('>I2', header, q + 1)
      end
    end
    if not day[3] then -- EXPIREAT into the past would delete the key; an expired day only raises day_max
      for r = 1, only and #ranges or 0 do
        write(item, day, common, is_above, ranges[r][1], ranges[r][2])
      end
      if not only then
        write(item, day, common, is_above, p, item[10])
      end
    end
  end
  for mailbox, held in pairs(gathered) do
    if type(held) == 'string' then
      call('ZADD', mailbox, '0', held)
    else
      call('ZADD', mailbox, unpack(held))
    end
  end
  for i = 3, #shard_fields do
    local lane = lanes[shard_fields[i]]
    if lane[1] ~= NO_DAY then
      n = #shard_writes
      shard_writes[n + 1], shard_writes[n + 2] = shard_fields[i], lane[1] .. lane[5] .. lane[6]
    end
  end
end
if ARGV[3] ~= ARGV[2] then
  n = #shard_writes
  shard_writes[n + 1], shard_writes[n + 2] = 'watermarks', ARGV[3]
end
if at < #ARGV then
  local low = tonumber(call('HGET', SHARD, 'low') or 0)
  local keep = math.max(low, math.min(floor(tonumber(ARGV[at + 1]) / 1024), low + DROPS_PER_CALL))
  for block = low, keep - 1 do
    call('UNLINK', ARGV[at + 2] .. string.format('%.0f', block))
  end
  n = #shard_writes
  shard_writes[n + 1], shard_writes[n + 2], shard_writes[n + 3] = 'fold', ARGV[at], 'fold_offset'
  shard_writes[n + 4], shard_writes[n + 5], shard_writes[n + 6] = ARGV[at + 1], 'low', string.format('%.0f', keep)
end
if #shard_writes > 0 then
  call('HSET', SHARD, unpack(shard_writes))
end
return {OK, applied_count, refused}
