-- Purpose: give leases back, so that anybody gets them at once; their next grant has the next epoch.
-- KEYS: 1 hash id -> "<epoch> <owner> <grant id>"  2 version of the route map
--   3 hash grant id -> "<last beat> <owner> <process>", to be no member any more, or none
-- ARGV: 1 grant id, then the ids; none = every id the grant has
-- RETURN: how many were given back
-- Atomicity: one step; leases of other grants are left alone. The first write is the only one that can fail.
-- Complexity: O(leases).

local flat = {}
if #ARGV > 1 then
  local rows = redis.call('HMGET', KEYS[1], unpack(ARGV, 2))
  for i, row in ipairs(rows) do
    flat[#flat + 1] = ARGV[i + 1]
    flat[#flat + 1] = row or ''
  end
else
  flat = redis.call('HGETALL', KEYS[1])
end
local writes = {}
for i = 1, #flat, 2 do
  local epoch, grant = string.match(flat[i + 1], '^(%d+) %S+ (%S+)$')
  if grant == ARGV[1] then
    writes[#writes + 1] = flat[i]
    writes[#writes + 1] = epoch .. ' - -'
  end
end
if #writes > 0 then
  redis.call('HSET', KEYS[1], unpack(writes))
end
local left = KEYS[3] and redis.call('HDEL', KEYS[3], ARGV[1]) or 0
if #writes > 0 or left > 0 then
  redis.call('INCR', KEYS[2])
end
return #writes / 2
