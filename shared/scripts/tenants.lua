-- What shares got and wait for in one queue. Reads only.
-- KEYS  1 queue (stream)
-- ARGV  1 how many shares at most of those served most, and as many of those whose turn is next
-- Reply flat list, three per share: share, tokens served, waiting requests
-- Why   A look at fairness whose cost and length do not grow with the number of shares.
-- @include _order

local queue, most = KEYS[1], tonumber(ARGV[1])
local wait, turn, served = beside(queue, PART.wait), beside(queue, PART.turn), beside(queue, PART.served)
local reply, seen = {}, {}
local function add(share)
  if seen[share] then return end
  seen[share] = true
  reply[#reply + 1] = share
  reply[#reply + 1] = math.floor(tonumber(redis.call('ZSCORE', served, share) or 0))
  reply[#reply + 1] = redis.call('ZLEXCOUNT', wait, first_of(share), last_of(share))
end
for _, share in ipairs(redis.call('ZRANGE', served, 0, most - 1, 'REV')) do add(share) end
for _, share in ipairs(redis.call('ZRANGE', turn, 0, most - 1)) do add(share) end
return reply
