-- Purpose: one consistent snapshot of all leases and of the processes that host the members of the pools.
-- KEYS: 1 version of the route map, then per pool: hash id -> "<epoch> <owner> <grant id>" and
--   hash grant id -> "<last beat> <owner> <process>"
-- ARGV: none
-- RETURN: {version, {id, lease, id, lease, ...}, {grant id, beat, ...}, the same of the next pool, ...}
-- Atomicity: one step, reads only.
-- Complexity: O(leases + members).

local reply = {tonumber(redis.call('GET', KEYS[1]) or 0)}
for i = 2, #KEYS do
  reply[i] = redis.call('HGETALL', KEYS[i])
end
return reply
