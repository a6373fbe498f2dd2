-- Purpose: store the cluster's immutable facts at first use (§27.2.4); afterwards read them.
-- KEYS: 1 hash name -> value
-- ARGV: name, value, name, value, ...
-- RETURN: {name, value, ...} as stored.
-- Atomicity: one step; the first caller's facts are stored whole, nobody else's are mixed in.
-- Complexity: O(facts).

if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], unpack(ARGV))
end
return redis.call('HGETALL', KEYS[1])
