-- Takes entries whose owner has gone silent, or the caller's own, and removes those of ended requests.
-- KEYS  1 queue (stream)
-- ARGV  1 consumer  2 instance  3 idle ms an entry must have reached  4 count  5 whose entries ('' = anybody's)
--       6 what: 0 all but suspects, 1 one suspect  7 max tries  8 request key prefix of the shard
--       9… requests that were taken from the caller because it was silent
-- Reply {number of suspects seen, entry id, rid, entry id, rid, …}
-- Why   A suspect was acquired and then lost without one record: it may be what killed its worker. It is given last and
--       alone, so that a second death convicts it and nobody else. One with all its tries used up is no danger (acquire
--       buries it), so it goes with the others. Revoking the lease here, with the claim, is what lets acquire succeed.
--       What the caller once lost it leaves to others, unless nobody takes it for as long again: it may hang again.
-- @include _load

local queue, consumer, instance = KEYS[1], ARGV[1], ARGV[2]
local now = redis_ms()
local count, whose, max_tries = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[7])
local PAGE = 100
local lost = {}
for i = 9, #ARGV do lost[ARGV[i]] = true end

local function pending_page(from)
  local args = {'XPENDING', queue, GROUP, 'IDLE', ARGV[3], from, '+', PAGE}
  if whose ~= '' then args[9] = whose end
  local page = redis.pcall(unpack(args))
  return page.err and {} or page -- NOGROUP: nothing is pending
end

local function forget(entry)
  redis.call('XACK', queue, GROUP, entry)
  redis.call('XDEL', queue, entry)
end

local function ends_with(text, tail)
  return string.sub(text, -#tail) == tail
end

-- rid and kind: 'take', 'suspect' or 'leave'. Entries without payload (trimmed) or of ended requests are removed.
local function classify(entry, idle)
  local found = redis.call('XRANGE', queue, entry, entry)[1]
  if not found then forget(entry) return nil, 'leave' end
  local rid = found[2][2]
  local m = redis.call('HMGET', ARGV[8] .. rid, 'state', 'entry', 'owner', 'tries', 'lease', 'holder')
  if m[1] ~= 'open' or m[2] ~= entry then forget(entry) return nil, 'leave' end
  local tries, mine = tonumber(m[4]), ends_with(m[3], '.' .. instance)
  if mine then return rid, whose ~= '' and 'take' or 'leave' end -- alive: I renew it, or ask for my own
  if whose ~= '' and m[5] and tonumber(m[5]) > now and m[6] ~= consumer then return rid, 'leave' end -- redelivered
  if lost[rid] and idle < 2 * ARGV[3] then return rid, 'leave' end
  if tries >= 1 and tries < max_tries then return rid, 'suspect' end
  return rid, 'take'
end

local reply, suspects, wanted = {0}, 0, ARGV[6] == '1' and 'suspect' or 'take'
local function take(entry, rid)
  redis.call('XCLAIM', queue, GROUP, consumer, 0, entry, 'IDLE', 0, 'JUSTID')
  if whose == '' then redis.call('HDEL', ARGV[8] .. rid, 'lease') end
  reply[#reply + 1] = entry
  reply[#reply + 1] = rid
end

local from, page = '-', nil
repeat
  page = pending_page(from)
  for _, item in ipairs(page) do
    if #reply > 2 * count then break end
    local rid, kind = classify(item[1], item[3])
    if kind == 'suspect' then suspects = suspects + 1 end
    if kind == wanted then take(item[1], rid) end
    from = '(' .. item[1]
  end
until #page < PAGE or #reply > 2 * count
reply[1] = suspects
return reply
