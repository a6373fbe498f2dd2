-- Purpose: renew all leases of one member of a pool, be counted as a member (DESIGN §4 "Leases and epochs").
-- KEYS: 1 hash grant id -> "<last beat> <owner> <process>"  2 hash id -> "<epoch> <owner> <grant id>"
--   3 hash id -> pinned member  4 version of the route map
-- ARGV: 1 owner  2 process  3 grant id  4 ttl, ms  5 age at which a beat is forgotten, ms, then the ids believed held
-- RETURN: {{live owners}, {id, member, ... of pins}, {ids not held}, {ids of the grant it does not know of}}
-- Atomicity: one step; the server's clock alone decides. The first write is the only one that can fail.
-- Complexity: O(members + ids).

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local beats = redis.call('HGETALL', KEYS[1])
local leases = redis.call('HGETALL', KEYS[2])
local held, lost, surplus = {}, {}, {}
for i = 6, #ARGV do
  held[ARGV[i]] = true
end
for i = 1, #leases, 2 do
  if string.match(leases[i + 1], '^%d+ %S+ (%S+)$') == ARGV[3] then
    if held[leases[i]] then
      held[leases[i]] = nil
    else
      surplus[#surplus + 1] = leases[i]
    end
  end
end
for i = 6, #ARGV do
  if held[ARGV[i]] then
    lost[#lost + 1] = ARGV[i]
  end
end
local pins = redis.call('HGETALL', KEYS[3])
if redis.call('HSET', KEYS[1], ARGV[3], string.format('%.0f %s %s', now, ARGV[1], ARGV[2])) == 1 then
  redis.call('INCR', KEYS[4])
end
local owners, seen = {ARGV[1]}, {[ARGV[1]] = true}
for i = 1, #beats, 2 do
  local beat_ms, owner = string.match(beats[i + 1], '^(%d+) (%S+)')
  local age = now - tonumber(beat_ms)
  if age < tonumber(ARGV[4]) then
    if not seen[owner] then
      seen[owner] = true
      owners[#owners + 1] = owner
    end
  elseif age >= tonumber(ARGV[5]) and beats[i] ~= ARGV[3] then
    redis.call('HDEL', KEYS[1], beats[i])
  end
end
return {owners, pins, lost, surplus}
