-- Purpose: grant leases that may be granted: free, given back, the asker's own, or long enough without a beat.
-- KEYS: 1 hash id -> "<epoch> <owner> <grant id>"  2 hash grant id -> "<last beat> <owner> <process>"
--   3 version of the route map
-- ARGV: 1 owner  2 grant id: ids that already have it keep their epoch  3 greatest epoch there may be
--   4 age of the last beat from which a lease may be taken, ms
--   5 1: an id whose epochs are used up gets the asker as its reader, under the epoch it has; then the ids
-- RETURN: {epoch or 0, ms to wait or -1 when the epochs are used up, ...}, a pair per id, in order
-- Atomicity: all checks come first; the first write is the only one that can fail.
-- Complexity: O(ids).

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local last, wait = tonumber(ARGV[3]), tonumber(ARGV[4])
local rows = redis.call('HMGET', KEYS[1], unpack(ARGV, 6))
local reply, writes, left = {}, {}, {}

-- Milliseconds until a lease of this grant may be taken by somebody else.
local function wait_of(grant)
  if not left[grant] then
    local beat = redis.call('HGET', KEYS[2], grant)
    local beat_ms = beat and tonumber(string.match(beat, '^(%d+) '))
    left[grant] = beat_ms and math.max(0, beat_ms + wait - now) or 0
  end
  return left[grant]
end

for i, row in ipairs(rows) do
  local epoch, owner, grant = 0, '-', '-'
  if row then
    epoch, owner, grant = string.match(row, '^(%d+) (%S+) (%S+)$')
    epoch = tonumber(epoch)
  end
  local granted, wait_ms = 0, 0
  if grant == ARGV[2] then
    granted = epoch
  else
    if owner ~= '-' and owner ~= ARGV[1] then
      wait_ms = wait_of(grant)
    end
    if wait_ms == 0 then
      if epoch >= last then
        wait_ms = -1
      else
        epoch = epoch + 1
        granted = epoch
      end
      if granted > 0 or ARGV[5] == '1' then
        writes[#writes + 1] = ARGV[i + 5]
        writes[#writes + 1] = string.format('%.0f %s %s', epoch, ARGV[1], ARGV[2])
      end
    end
  end
  reply[#reply + 1] = granted
  reply[#reply + 1] = wait_ms
end
if #writes > 0 then
  redis.call('HSET', KEYS[1], unpack(writes))
  redis.call('INCR', KEYS[3])
end
return reply
