-- Purpose: one consistent snapshot of all leases.
-- KEYS: 1 version of the route map, then one hash id -> "<epoch> <owner> <grant id>" per kind
-- ARGV: none
-- RETURN: {version, {id, lease, id, lease, ...} per kind}
-- Atomicity: one step, reads only.
-- Complexity: O(leases).

local reply = {tonumber(redis.call('GET', KEYS[1]) or 0)}
for i = 2, #KEYS do
  reply[i] = redis.call('HGETALL', KEYS[i])
end
return reply
