-- How many requests are ahead of a waiting one, and how long that takes at the measured drain rate. Reads only.
-- KEYS  1 req (hash)  2 its queue (stream)  3 its load (hash), then the queues that are served before it (streams)
-- ARGV  none
-- Reply {ahead, expected wait in ms; -1 = not measured yet} · {-1} unknown or ended · {0, 0} running or handed back
-- Why   Bounded by the queue limit that submit keeps.
-- @include _load

local m = redis.call('HMGET', KEYS[1], 'state', 'owner', 'entry')
if m[1] ~= 'open' then return {-1} end
local pending = redis.pcall('XPENDING', KEYS[2], GROUP, m[3], m[3], 1)
if m[2] ~= '' or (not pending.err and pending[1]) then return {0, 0} end

local ahead, undelivered = 0, waiting_and_running(KEYS[2])
-- Undelivered entries are the youngest ones; those after this request's are behind it.
local from_here = #redis.call('XRANGE', KEYS[2], m[3], '+')
ahead = math.max(0, undelivered - from_here)
for i = 4, #KEYS do
  ahead = ahead + (waiting_and_running(KEYS[i]))
end
local rate = drain_rate(KEYS[3], redis_ms())
return {ahead, rate and math.ceil((ahead + 1) * 1000 / math.max(rate, 0.001)) or -1}
