-- Purpose: commit messages of conversation buckets of one instance (DESIGN-data §3). The requests of a bucket are judged
--   one after another against the state the earlier ones leave; everything accepted is then written.
-- KEYS: for each bucket: 1 fence  2 hlc  3 next outbox offset  4 outbox stream
-- ARGV: 1 dedup TTL (s), then for each bucket: 1 bucket tag "{bNNNN}:"  2 fencing_epoch  3 number of requests, then for
--   each request:
--   1 dedup key  2 dedup key of the predecessor or ""  3 "<tenant>:<conversation>"  4 "<tenant>:<group>" or ""
--   5 frozen membership_version  6 request digest[16]  7 message_id[16]  8 record  9 outbox record without
--   conversation_seq  10 dek_id  11 wrapped DEK  12 packed head (message.py)
--   13 number of arguments of a membership rewrite that follow, 0 if none:
--      new version, member_count, next_slot, index, n, n x (shard, snapshot), n, n x (user, slot, shard), n, n x user
-- RETURN: for each bucket an error or {offset of the first accepted request, then one item per request}:
--   conversation_seq (number) = committed, "D" dedup value, "V" stored version, "I" greatest message_id, "K" dek_id NUL
--   wrapped DEK, "O" out of order, "U" unjudged. Errors FENCED (a greater epoch is stored), NOTOPEN (a lower one), and
--   what the server said of the first write: nothing written of that bucket, the others are not concerned.
-- Atomicity: nothing of a bucket is written before all its requests are judged. The first write is an XADD, the only
--   command that can fail (out of memory, offset below the stream's last id); ids are dense, so if the first XADD
--   succeeds all do, and the rest cannot fail.
-- Complexity: O(requests + members changed). Numbers: sequences and offsets stay below 2^53; ids are compared as words.

local FIXED = 13
local ZERO_ID = string.rep('\0', 16)
local OPEN_END = '\127\255\255\255\255\255\255\255'
local RECORDS_PER_BUCKET = 4096
local call, floor, format, pack, unpack_words = redis.call, math.floor, string.format, struct.pack, struct.unpack
local TTL = ARGV[1]

-- Of the bucket in work.
local TAG, hlc, conversations, versions, seen, accepted

local function be64(n)
  return pack('>I4I4', floor(n / 4294967296), n % 4294967296)
end

local function greater(a, b)
  local a1, a2, a3, a4 = unpack_words('>I4I4I4I4', a)
  local b1, b2, b3, b4 = unpack_words('>I4I4I4I4', b)
  if a1 ~= b1 then return a1 > b1 end
  if a2 ~= b2 then return a2 > b2 end
  if a3 ~= b3 then return a3 > b3 end
  return a4 > b4
end

-- State of a conversation as the requests accepted so far leave it.
local function conversation(name)
  local state = conversations[name]
  if not state then
    local key = 'conv:' .. TAG .. name
    local row = call('HMGET', key, 'seq', 'id', 'dek')
    state = {key = key, seq = tonumber(row[1] or 0), id = row[2] or ZERO_ID, dek = row[3], new_dek = false}
    conversations[name] = state
  end
  return state
end

local function version_of(group)
  local version = versions[group]
  if not version then
    version = call('HGET', 'grp:' .. TAG .. group, 'version') or '0'
    versions[group] = version
  end
  return version
end

-- Verdict of a request that is not accepted, or nil. `at` is the index of its first argument.
local function refusal(at)
  local after, name, group, id, dek = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 6], ARGV[at + 9]
  if group ~= '' then
    local version = version_of(group)
    if version == '0' or version ~= ARGV[at + 4] then return 'V' .. version end
  end
  local state = conversation(name)
  if not greater(id, hlc) then return 'I' .. hlc end
  if state.id ~= ZERO_ID and not greater(id, state.id) then return 'I' .. state.id end
  if state.dek and state.dek ~= dek then
    return 'K' .. state.dek .. '\0' .. (state.new_dek or call('HGET', state.key, 'wdek') or '')
  end
  if after ~= '' and not seen[after] and call('EXISTS', after) == 0 then return 'O' end
end

local function accept(at)
  local name, id = ARGV[at + 2], ARGV[at + 6]
  local state = conversation(name)
  local seq = state.seq + 1
  state.seq, state.id, state.at = seq, id, at
  if not state.dek then
    state.dek, state.new_dek = ARGV[at + 9], ARGV[at + 10]
  end
  hlc = id
  local value = ARGV[at + 5] .. id .. be64(seq) .. name
  seen[ARGV[at]] = value
  accepted[#accepted + 1] = {at, seq, value}
  if ARGV[at + 12] ~= '0' then versions[ARGV[at + 3]] = ARGV[at + FIXED] end
  return seq
end

local function rewrite_membership(at, seq)
  local name = TAG .. ARGV[at + 3]
  local version = ARGV[at + FIXED]
  at = at + FIXED
  call('HSET', 'grp:' .. name, 'version', version, 'count', ARGV[at + 1], 'next_slot', ARGV[at + 2])
  call('HSET', 'grpidx:' .. name, version, ARGV[at + 3])
  at = at + 4
  for _ = 1, tonumber(ARGV[at]) do
    call('HSET', 'grpver:' .. name .. ':' .. ARGV[at + 1], version, ARGV[at + 2])
    at = at + 2
  end
  at = at + 1
  local intervals_key = 'grpmember:' .. name
  for _ = 1, tonumber(ARGV[at]) do
    local user, slot, shard = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
    call('HSET', 'grpslot:' .. name, user, slot)
    call('HSET', 'grpusers:' .. name .. ':' .. shard, slot, user)
    local intervals = call('HGET', intervals_key, user) or ''
    call('HSET', intervals_key, user, intervals .. be64(seq - 1) .. OPEN_END)
    at = at + 3
  end
  at = at + 1
  for _ = 1, tonumber(ARGV[at]) do
    local user = ARGV[at + 1]
    local intervals = call('HGET', intervals_key, user) or ''
    if string.sub(intervals, -8) == OPEN_END then
      call('HSET', intervals_key, user, string.sub(intervals, 1, -9) .. be64(seq))
    end
    at = at + 1
  end
end

-- Judge `count` requests from argument `at` on; the reply, or an error that ends the bucket, and where the next one starts.
local function judge(at, count, epoch, stored_epoch)
  local reply, blocked, failure = {0}, {}, nil
  for i = 1, count do
    local name = ARGV[at + 2]
    local verdict
    if blocked[name] then
      verdict = 'U'
    else
      local hit = seen[ARGV[at]] or call('GET', ARGV[at])
      if hit then
        verdict = 'D' .. hit
      elseif stored_epoch ~= epoch then
        local code = stored_epoch > epoch and 'FENCED' or 'NOTOPEN'
        failure = redis.error_reply(code .. ' epoch ' .. stored_epoch .. ' is stored')
      else
        verdict = refusal(at)
        if verdict then
          blocked[name] = true
        else
          verdict = accept(at)
        end
      end
    end
    reply[i + 1] = verdict
    at = at + FIXED + tonumber(ARGV[at + 12])
  end
  return failure or reply, at
end

-- Write what was accepted, first what can fail; nil, or the error of the first write.
local function write(OUTBOX, offset)
  for i, item in ipairs(accepted) do
    offset = offset + 1
    local words = pack('<I4I4', item[2] % 4294967296, floor(item[2] / 4294967296))
    local id, record = format('%.0f-0', offset), '\9' .. words .. ARGV[item[1] + 8]
    if i == 1 then
      local added = redis.pcall('XADD', OUTBOX, id, 'r', record)
      if added.err then return added end
    else
      call('XADD', OUTBOX, id, 'r', record)
    end
  end
  return nil, offset
end

local function write_rest(HLC, NEXT, offset)
  call('MSET', NEXT, offset, HLC, hlc)
  for _, item in ipairs(accepted) do
    local first, seq = item[1], item[2]
    call('HSET', 'rec:' .. TAG .. ARGV[first + 2] .. ':' .. floor(seq / RECORDS_PER_BUCKET), seq, ARGV[first + 7])
    call('SET', ARGV[first], item[3], 'EX', TTL)
    if ARGV[first + 12] ~= '0' then rewrite_membership(first, seq) end
  end
  for _, state in pairs(conversations) do
    local last = state.at
    if last then
      local key, seq, id, head = state.key, state.seq, state.id, ARGV[last + 11]
      if state.new_dek then
        call('HSET', key, 'seq', seq, 'id', id, 'head', head, 'dek', state.dek, 'wdek', state.new_dek)
      else
        call('HSET', key, 'seq', seq, 'id', id, 'head', head)
      end
    end
  end
end

local replies, at = {}, 2
for bucket = 1, #KEYS / 4 do
  local key = bucket * 4 - 3
  local epoch, count = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local stored = call('MGET', KEYS[key + 1], KEYS[key + 2])
  TAG, hlc = ARGV[at], stored[1] or ZERO_ID
  conversations, versions, seen, accepted = {}, {}, {}, {}
  local reply
  reply, at = judge(at + 3, count, epoch, tonumber(call('HGET', KEYS[key], 'epoch') or 0))
  if not reply.err and #accepted > 0 then
    local offset = tonumber(stored[2] or 0)
    local failure, next_offset = write(KEYS[key + 3], offset)
    if failure then
      reply = failure
    else
      reply[1] = offset
      write_rest(KEYS[key + 1], KEYS[key + 2], next_offset)
    end
  end
  replies[bucket] = reply
end
return replies
