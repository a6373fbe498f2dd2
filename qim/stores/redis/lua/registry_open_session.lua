-- Purpose: give a device the user's next session_epoch; above the device limit the least recently active one goes (§5.4.4).
-- KEYS: 1 hash device -> "<session epoch> <last login, unix ms>", and the user's counter under ":epoch"
-- ARGV: 1 device  2 devices at most  3 now, unix ms
-- RETURN: {session_epoch, device that had to go or "", its session epoch}
-- Atomicity: reads first; the first write is the only one that can fail. Not idempotent: every login is a new epoch.
-- Complexity: O(devices).

local flat = redis.call('HGETALL', KEYS[1])
local epoch, others, oldest, oldest_epoch, oldest_ms = 0, 0, '', 0, math.huge
for i = 1, #flat, 2 do
  if flat[i] == ':epoch' then
    epoch = tonumber(flat[i + 1])
  elseif flat[i] ~= ARGV[1] then
    local e, ms = string.match(flat[i + 1], '^(%d+) (%d+)$')
    e, ms = tonumber(e), tonumber(ms)
    others = others + 1
    if ms < oldest_ms or (ms == oldest_ms and e < oldest_epoch) then
      oldest, oldest_epoch, oldest_ms = flat[i], e, ms
    end
  end
end
epoch = string.format('%.0f', epoch + 1)
redis.call('HSET', KEYS[1], ':epoch', epoch, ARGV[1], epoch .. ' ' .. ARGV[3])
if others < tonumber(ARGV[2]) then
  return {tonumber(epoch), '', 0}
end
redis.call('HDEL', KEYS[1], oldest)
return {tonumber(epoch), oldest, oldest_epoch}
