-- Puts entries back that were read but not acquired: still pending with me and without an owner, then claimable at once.
-- KEYS  1 queue (stream), then per entry: req (hash)
-- ARGV  1 consumer  2 control channel, then per entry: entry id
-- Reply number put back
-- Why   A drain between read and acquire; a read that brought more than there are slots for.

local released = 0
for i = 2, #KEYS do
  local entry = ARGV[i + 1]
  local pending = redis.pcall('XPENDING', KEYS[1], GROUP, entry, entry, 1)
  if not pending.err and pending[1] and pending[1][2] == ARGV[1] and redis.call('HGET', KEYS[i], 'owner') == '' then
    redis.call('XCLAIM', KEYS[1], GROUP, NOBODY, 0, entry, 'IDLE', OPEN_TTL, 'JUSTID')
    released = released + 1
  end
end
if released > 0 then redis.call('PUBLISH', ARGV[2], 'wake') end
return released
