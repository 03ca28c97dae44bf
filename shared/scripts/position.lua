-- How many requests are served before a waiting one, and how long that takes at the measured drain rate. Reads only.
-- KEYS  1 req (hash)  2 its queue (stream)  3 its load (hash), then the queues that are served before it (streams)
-- ARGV  none
-- Reply {ahead, expected wait in ms; -1 = not measured yet} · {-1} unknown or ended · {0, 0} running or handed back
-- Why   An estimate, as if all waiting requests were alike: in fair turn every other share gets one for each of this
--       share's own before it, and one more when its turn is first. A few shares are looked at and stand for all, so
--       the cost is bounded.
-- @include _order

local MOST = 32

local m = redis.call('HMGET', KEYS[1], 'state', 'owner', 'entry', 'share', 'priority')
if m[1] ~= 'open' then return {-1} end
local queue = KEYS[2]
local pending = redis.pcall('XPENDING', queue, GROUP, m[3], m[3], 1)
if m[2] ~= '' or (not pending.err and pending[1]) then return {0, 0} end

local function ahead_here()
  local wait, turn, share = beside(queue, PART.wait), beside(queue, PART.turn), m[4] or ''
  local member = waiting_member(share, tonumber(m[5] or 0), m[3], string.sub(KEYS[1], -RID_LENGTH))
  local own, mine = redis.call('ZLEXCOUNT', wait, first_of(share), '(' .. member), redis.call('ZSCORE', turn, share)
  if not mine or not redis.call('ZSCORE', wait, member) then return math.max(0, waiting_and_running(queue) - 1) end
  local others, seen, rows = 0, 0, redis.call('ZRANGE', turn, 0, MOST, 'WITHSCORES')
  for i = 1, #rows, 2 do
    if rows[i] ~= share then
      local turns = own + (tonumber(rows[i + 1]) < tonumber(mine) and 1 or 0)
      others = others + math.min(turns, redis.call('ZLEXCOUNT', wait, first_of(rows[i]), last_of(rows[i])))
      seen = seen + 1
    end
  end
  local unseen = redis.call('ZCARD', turn) - 1 - seen
  return own + others + (seen > 0 and math.floor(unseen * others / seen) or 0)
end

local ahead = ahead_here()
for i = 4, #KEYS do
  ahead = ahead + (waiting_and_running(KEYS[i]))
end
local rate = drain_rate(KEYS[3], redis_ms())
return {ahead, rate and math.ceil((ahead + 1) * 1000 / math.max(rate, 0.001)) or -1}
