-- Keeps leases alive, and only the caller's own: owner equal, then the entry is made fresh under the caller's name.
-- KEYS  1 queue of class interactive  2 queue of class batch, then per claim: req (hash), log (stream)
-- ARGV  1 consumer  2 lease ms, then per claim 3: rid, owner, class (1, 2)
-- Reply flat list, two per claim: kind (0 OK · 3 FENCED · 4 CLOSED · 5 GONE), cancelled (0, 1)
-- Why   XCLAIM alone would let a paused worker steal. FORCE and the new entry repair a destroyed group and a lost queue
--       entry (XTRIM, DEL): without an entry nobody would take the request over if this worker died.
-- @include _load

local consumer, lease, now = ARGV[1], tonumber(ARGV[2]), redis_ms()

local function claim(queue, entry)
  return redis.pcall('XCLAIM', queue, GROUP, consumer, 0, entry, 'IDLE', 0, 'FORCE', 'JUSTID')
end

local function renew(req, log, rid, owner, queue)
  local m = redis.call('HMGET', req, 'owner', 'state', 'entry', 'cancel')
  if not m[1] then return 5, 0 end
  if m[1] ~= owner then return 3, 0 end
  if m[2] ~= 'open' then return 4, 0 end
  local claimed = claim(queue, m[3])
  if claimed.err then -- NOGROUP
    redis.call('XGROUP', 'CREATE', queue, GROUP, 0, 'MKSTREAM')
    claimed = claim(queue, m[3])
  end
  if #claimed == 0 then
    local entry = redis.call('XADD', queue, '*', 'rid', rid)
    redis.call('HSET', req, 'entry', entry)
    claim(queue, entry)
  end
  redis.call('HSET', req, 'lease', now + lease)
  redis.call('PEXPIRE', req, OPEN_TTL)
  redis.call('PEXPIRE', log, OPEN_TTL)
  return 0, m[4] and 1 or 0
end

local replies = {}
for i = 0, (#KEYS - 2) / 2 - 1 do
  local a = 3 + 3 * i
  local queue = KEYS[tonumber(ARGV[a + 2])]
  replies[2 * i + 1], replies[2 * i + 2] = renew(KEYS[3 + 2 * i], KEYS[4 + 2 * i], ARGV[a], ARGV[a + 1], queue)
end
return replies
