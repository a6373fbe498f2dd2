-- Purpose: give back all leases of members of a pool whose death is proven, without any wait (DESIGN-data §6).
-- KEYS: 1 hash id -> "<epoch> <owner> <grant id>"  2 hash grant id -> "<last beat> <owner> <process>"
--   3 version of the route map
-- ARGV: 1 process that is about to host them again: they stay members for one ttl; "" = none, then the owners
-- RETURN: how many leases were given back
-- Atomicity: one step. The first write is the only one that can fail. Idempotent.
-- Complexity: O(leases + members).

local dead = {}
for i = 2, #ARGV do
  dead[ARGV[i]] = true
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local leases, beats = redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2])
local writes = {}
for i = 1, #leases, 2 do
  local epoch, owner = string.match(leases[i + 1], '^(%d+) (%S+) ')
  if dead[owner] then
    writes[#writes + 1] = leases[i]
    writes[#writes + 1] = epoch .. ' - -'
  end
end
redis.call('INCR', KEYS[3])
if #writes > 0 then
  redis.call('HSET', KEYS[1], unpack(writes))
end
for i = 1, #beats, 2 do
  if dead[string.match(beats[i + 1], '^%d+ (%S+) ')] then
    redis.call('HDEL', KEYS[2], beats[i])
  end
end
if ARGV[1] ~= '' then
  for i = 2, #ARGV do
    redis.call('HSET', KEYS[2], 'expected-' .. ARGV[i], string.format('%.0f %s %s', now, ARGV[i], ARGV[1]))
  end
end
return #writes / 2
