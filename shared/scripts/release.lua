-- Puts pending entries back that their consumer does not run: claimable at once, by any worker.
-- KEYS  1 queue (stream)  2 load (hash)
-- ARGV  1 consumer  2 its instance ('' = the consumer is surely dead: all it had)  3 control channel  4 request key
--       prefix  5 how many ids of requests follow that the instance runs; after them entry ids, none = all it has
--       pending
-- Reply number put back
-- Why   A drain between read and acquire, a read that brought more than there is room for, a supervisor that saw its
--       worker exit and need not wait for the lease. Never what the instance runs: that goes through hand_back. What
--       began for it in a call whose reply it never saw is given back with its try. All other tries stay.
-- @include _load

local queue, consumer, instance, prefix = KEYS[1], ARGV[1], ARGV[2], ARGV[4]
local runs, first = {}, 6 + tonumber(ARGV[5])
for i = 6, first - 1 do runs[ARGV[i]] = true end

local function put_back(entry)
  local pending = redis.pcall('XPENDING', queue, GROUP, entry, entry, 1)
  if pending.err or not pending[1] or pending[1][2] ~= consumer then return 0 end
  local found = redis.call('XRANGE', queue, entry, entry)[1]
  if not found then return redis.call('XACK', queue, GROUP, entry) end
  local rid = found[2][2]
  local req = prefix .. rid
  local m = redis.call('HMGET', req, 'owner', 'holder', 'lease', 'tries', 'prompt_tokens', 'state')
  local mine = instance ~= '' and m[1] and string.sub(m[1], -#instance) == instance
  if mine and (runs[rid] or m[6] ~= 'open') then return 0 end
  if m[3] and m[2] ~= consumer then return 0 end -- redelivered, and its owner lives: the owner's renewal takes it back
  redis.call('HDEL', req, 'lease')
  redis.call('XCLAIM', queue, GROUP, NOBODY, 0, entry, 'IDLE', OPEN_TTL, 'JUSTID')
  if mine then
    redis.call('HSET', req, 'owner', '', 'tries', math.max(0, m[4] - 1))
    redis.call('HDEL', req, 'holder')
    add_waiting_tokens(KEYS[2], m[5])
  end
  return 1
end

local entries = {}
for i = first, #ARGV do entries[#entries + 1] = ARGV[i] end
if #entries == 0 then
  local page = redis.pcall('XPENDING', queue, GROUP, '-', '+', 10000, consumer)
  for _, item in ipairs(page.err and {} or page) do entries[#entries + 1] = item[1] end
end
local released = 0
for _, entry in ipairs(entries) do released = released + put_back(entry) end
if released > 0 then redis.call('PUBLISH', ARGV[3], 'wake') end
return released
