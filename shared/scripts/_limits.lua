-- Limits of one share, over all models and pods (included by submit and _close). Leaky buckets on Redis's clock: what
-- was used runs out at limit / 60 s, so there is no window whose edge lets twice the limit through.
-- limit  hash  requests, tokens: used and not yet run out · requests_at, tokens_at: Redis ms when that was so
-- open   set   ids of its unfinished requests, where their number is limited

local PRUNE = 100

-- Used now. 0 = no limit, nothing is counted.
local function used_now(limit, field, per_minute, now)
  if per_minute == 0 then return 0 end
  local m = redis.call('HMGET', limit, field, field .. '_at')
  return math.max(0, tonumber(m[1] or 0) - math.max(0, now - tonumber(m[2] or now)) * per_minute / 60000)
end

-- ms until `need` more fit, 0 = now. What is larger than the whole limit fits once everything has run out.
local function ms_until(used, need, per_minute)
  if per_minute == 0 then return 0 end
  return math.max(0, math.ceil((used + math.min(need, per_minute) - per_minute) * 60000 / per_minute))
end

-- Whether another request may be open. Ids of requests that vanished without an end are forgotten first.
local function may_open(open, prefix, most)
  if most == 0 or redis.call('SCARD', open) < most then return true end
  for _, rid in ipairs(redis.call('SRANDMEMBER', open, PRUNE)) do
    if redis.call('HGET', prefix .. rid, 'state') ~= 'open' then redis.call('SREM', open, rid) end
  end
  return redis.call('SCARD', open) < most
end

local function set_used(limit, field, used, now)
  redis.call('HSET', limit, field, string.format('%.3f', math.max(0, used)), field .. '_at', now)
  redis.call('PEXPIRE', limit, LOAD_TTL)
end
