-- Purpose: append chunks of dispatches to personal mailboxes, set their progress bits, move W and save the fold, in one
--   step (DESIGN-data §5).
-- KEYS: 1 shard hash: epoch, grant, watermarks (W: lane_count big-endian u64), fold, fold_offset,
--      low (lowest progress block that may still exist), and day_max by lane:
--      lane byte -> records of 16 bytes, last appended day first: be32 UTC day ‖ be64 mailbox_seq ‖ be32 chunk
--   2.. progress hashes of the blocks of 1,024 offsets this call names: be48 offset ‖ u8 lane ->
--      be32 chunk_size ‖ be32 chunk_count ‖ be32 done ‖ bitmap (chunk k = bit k%8 of byte k/8)
-- ARGV: 1 shard_epoch  2 W the caller believes in, "" = W does not move  3 new W
--   4 rows that must be complete, 13 bytes each: be48 offset ‖ u8 lane ‖ be16 (KEYS index - 2) ‖ be32 chunk_count
--   5 UTC days of the items, be32 each  6 number of items, then for each item:
--      header of 37 bytes: be48 offset ‖ u8 lane ‖ be64 mailbox_seq ‖ be32 chunk ‖ be32 chunk_size ‖ be32 chunk_count ‖
--         u8 lane ‖ be16 (KEYS index - 2) ‖ u8 index into 5 ‖ be16 a ‖ be16 b ‖ be16 recipients
--      common; if b > 0: conversation id, its first-seen value, b user_conversation_state keys to register it in
--      for each recipient: mailbox key ending in the day, u8 ordinal ‖ event_id[8] ‖ ref; only the first `a` may have a
--         new key, which then gets its expiry
--   optional, last: fold, its offset C, progress key prefix: at most 64 blocks wholly below C are dropped
-- RETURN: {status, items applied, entries refused}; status 0 done, 1 W or a required row is not as told, 2 other chunk
--   size or count stored, 3 a greater epoch stored, 4 a lower one. Not 0: nothing was written.
-- Atomicity: all checks come first; only the first write can fail (out of memory). Idempotent by (offset, lane, chunk).
--   Expects that a user has one lane, and that within a row (user, ordinal, event_id) is unique.
-- Complexity: O(log n) per entry, n = entries of that user and day; entries are probed for a different member under
--   their 17-byte prefix only if day_max does not prove that this chunk was never appended.
-- 5 of 6 µs of a single 1:1 entry are this file, not ZADD: measure before and after any change.

local call, unpack_bytes, pack_bytes = redis.call, struct.unpack, struct.pack
local sub, byte, char, rep, floor = string.sub, string.byte, string.char, string.rep, math.floor
local OK, W_MOVED, CHUNK_SIZE, FENCED, STALE = 0, 1, 2, 3, 4
local SHARD, BLOCK_0, FIRST_ITEM, FIELDS, VALUES_PER_READ, DROPS_PER_CALL = KEYS[1], 2, 7, 10, 1000, 64
local DAY_S, DAYS_KEPT = 86400, 8 -- mailbox_retention_days + 1: the day itself is kept whole (§18.3.3)
local NO_DAY = '\255\255\255\255'
local COUNT = tonumber(ARGV[6])

-- What the call names: items, progress rows by block, lanes.
local items, rows, block_rows, lanes, shard_fields, at, n = {}, {}, {}, {}, {'epoch', 'watermarks'}, FIRST_ITEM, 0
for i = 0, (COUNT - 1) * FIELDS, FIELDS do
  local key, mark, spec, lane, block, day, dated, registered, recipients =
    unpack_bytes('>c7c12c8c1I2BI2I2I2', ARGV[at])
  items[i + 1], items[i + 2], items[i + 3], items[i + 4], items[i + 5] = key, mark, spec, lane, block
  items[i + 6], items[i + 7], items[i + 8], items[i + 9] = day, dated, registered, recipients
  items[i + 10] = at
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
  if not lanes[lane] then
    lanes[lane] = true
    shard_fields[#shard_fields + 1] = lane
  end
  at = at + 2 + 2 * recipients
  if registered > 0 then
    at = at + 2 + registered
  end
end
local required = ARGV[4]
for p = 1, #required, 13 do
  local key, block = unpack_bytes('>c7I2', required, p)
  if rows[key] == nil then
    rows[key] = false
    local list = block_rows[block] or {[0] = 0}
    block_rows[block] = list
    n = list[0] + 1
    list[0], list[n] = n, key
  end
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
local applied, applied_count, row_writes, only_chunk = {}, 0, {}, {}
for i = 0, (COUNT - 1) * FIELDS, FIELDS do
  local key, spec, block = items[i + 1], items[i + 3], items[i + 5]
  local row, alone, is_new = rows[key], only_chunk[spec], true
  if alone == nil then
    alone = sub(spec, 5) == '\0\0\0\1' and spec .. '\0\0\0\1\1'
    only_chunk[spec] = alone
  end
  if alone then
    if row and row ~= alone then
      return {CHUNK_SIZE, 0, 0}
    end
    is_new, row = not row, alone
  else
    local chunk = unpack_bytes('>I4', items[i + 2], 9)
    local at_byte, mask = 13 + floor(chunk / 8), 2 ^ (chunk % 8)
    if not row then
      local bytes = floor((unpack_bytes('>I4', spec, 5) + 7) / 8)
      row = spec .. '\0\0\0\1' .. rep('\0', at_byte - 13) .. char(mask) .. rep('\0', bytes - at_byte + 12)
    elseif sub(row, 1, 8) ~= spec then
      return {CHUNK_SIZE, 0, 0}
    else
      local bits = byte(row, at_byte)
      is_new = bit.band(bits, mask) == 0
      if is_new then
        row = spec .. pack_bytes('>I4', unpack_bytes('>I4', row, 9) + 1) .. sub(row, 13, at_byte - 1)
          .. char(bits + mask) .. sub(row, at_byte + 1)
      end
    end
  end
  if is_new then
    rows[key] = row
    applied_count = applied_count + 1
    applied[applied_count] = i
    local writes = row_writes[block]
    if writes then
      n = writes[0]
      writes[0], writes[n + 1], writes[n + 2] = n + 2, key, row
    else
      row_writes[block] = {[0] = 2, key, row}
    end
  end
end
for p = 1, #required, 13 do
  local key, _, count = unpack_bytes('>c7I2c4', required, p)
  if not rows[key] or sub(rows[key], 5, 12) ~= count .. count then
    return {W_MOVED, 0, 0}
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

  for k = 1, applied_count do
    local i = applied[k]
    local mark, lane, day = items[i + 2], lanes[items[i + 4]], days[items[i + 6] + 1]
    local dated, registered, recipients, p = items[i + 7], items[i + 8], items[i + 9], items[i + 10]
    local common = ARGV[p + 1]
    p = p + 2
    if lane[1] ~= day[1] then
      turn_to_day(lane, day[1])
    end
    local e, o, c = unpack_bytes('>I2I6I4', mark)
    local is_above = e > lane[2] or e == lane[2] and (o > lane[3] or o == lane[3] and c > lane[4])
    if is_above then
      lane[2], lane[3], lane[4], lane[5] = e, o, c, mark
    end
    if registered > 0 then
      for r = p + 2, p + 1 + registered do
        call('HSETNX', ARGV[r], ARGV[p], ARGV[p + 1])
      end
      p = p + 2 + registered
    end
    if not day[3] then -- EXPIREAT into the past would delete the key; an expired day only raises day_max
      local seq, other = sub(mark, 1, 8), day[4]
      for r = 1, recipients do
        local mailbox, member = ARGV[p], seq .. ARGV[p + 1] .. common
        p = p + 2
        if other then
          mailbox = sub(mailbox, 1, other[1]) .. other[2]
        end
        local found = not is_above
          and call('ZRANGEBYLEX', mailbox, '[' .. sub(member, 1, 17), '+', 'LIMIT', '0', '1')[1]
        if found and found ~= member and sub(found, 1, 17) == sub(member, 1, 17) then
          refused = refused + 1
        else
          call('ZADD', mailbox, '0', member)
          if r <= dated then
            call('EXPIREAT', mailbox, tostring(day[2]), 'NX')
          end
        end
      end
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
