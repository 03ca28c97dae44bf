-- Gives requests back on purpose (drain): owner equal, then the entry is claimable at once and the try is not charged.
-- KEYS  1 queue 2 load of class interactive  3 queue 4 load of class batch, then per claim: req (hash)
-- ARGV  1 control channel, then per claim 2: owner, class (1, 2)
-- Reply number handed back
-- Why   The entry goes to the consumer "nobody" with a huge idle time, ahead of what waits undelivered, so a running
--       stream goes on at the next reclaim; the wake-up makes that now. A replay finds no owner and does nothing.
-- @include _load

local handed = 0
for i = 5, #KEYS do
  local req, a = KEYS[i], 2 + 2 * (i - 5)
  local class = tonumber(ARGV[a + 1])
  local queue, load = KEYS[2 * class - 1], KEYS[2 * class]
  local m = redis.call('HMGET', req, 'owner', 'state', 'entry', 'tries', 'prompt_tokens')
  if m[1] == ARGV[a] and m[2] == 'open' then
    -- First, because it is allowed when memory is full, and then so is the rest. NOGROUP: '>' will give it again.
    redis.pcall('XCLAIM', queue, GROUP, NOBODY, 0, m[3], 'IDLE', OPEN_TTL, 'FORCE', 'JUSTID')
    redis.call('HSET', req, 'owner', '', 'tries', math.max(0, m[4] - 1))
    redis.call('HDEL', req, 'lease', 'holder')
    add_waiting_tokens(load, m[5])
    handed = handed + 1
  end
end
if handed > 0 then redis.call('PUBLISH', ARGV[1], 'wake') end
return handed
