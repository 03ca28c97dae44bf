-- Accepts a request: metadata and queue entry, both or neither.
-- KEYS  1 req (hash)  2 log (unused here; as in restore)  3 queue (stream)  4 load (hash)
--       5 idem (string; only used when ARGV 10 > 0)
-- ARGV  1 rid  2 nonce of this call  3 body  4 tenant  5 deadline ms (0 = none)  6 choices  7 prompt tokens
--       8 max waiting requests  9 max waiting prompt tokens  10 ttl of idem in ms (0 = no idempotency key)
--       11 request key prefix of the shard
-- Reply {1, rid} accepted · {0, rid} attached to an earlier request · {-1, retry after s, waiting, tokens waiting} full
-- Why   The nonce tells a replay of this very call (its reply was lost; accepted) from another call with the same rid
--       (attached). An idempotency key whose request has expired is free again. The waiting-token counter heals itself
--       whenever nothing waits.
-- @include _load

local req, queue, load, idem = KEYS[1], KEYS[3], KEYS[4], KEYS[5]
local rid, nonce, prompt_tokens = ARGV[1], ARGV[2], tonumber(ARGV[7])
local idem_ttl = tonumber(ARGV[10])

local known = redis.call('HGET', req, 'nonce')
if known then return {known == nonce and 1 or 0, rid} end
if idem_ttl > 0 then
  local earlier = redis.call('GET', idem)
  if earlier and redis.call('EXISTS', ARGV[11] .. earlier) == 1 then return {0, earlier} end
end

local waiting = waiting_and_running(queue)
local tokens = tonumber(redis.call('HGET', load, 'tokens') or 0)
if waiting == 0 and tokens ~= 0 then
  redis.call('HSET', load, 'tokens', 0)
  tokens = 0
end
-- A lone request larger than the token limit is let in: refusing it for ever would not be back-pressure.
local too_many = waiting + 1 - ARGV[8]
local too_long = waiting > 0 and tokens + prompt_tokens - ARGV[9] or 0
if too_many > 0 or too_long > 0 then
  local requests_per_s, tokens_per_s = drain_rate(load, redis_ms())
  local seconds = 10 -- nothing has finished yet: no measure
  if requests_per_s then seconds = math.max(too_many / requests_per_s, too_long / tokens_per_s) end
  return {-1, math.ceil(math.min(60, math.max(1, seconds))), waiting, tokens}
end

local entry = redis.call('XADD', queue, '*', 'rid', rid)
redis.call('HSET', req, 'state', 'open', 'epoch', 0, 'owner', '', 'next', 0, 'tries', 0, 'entry', entry, 'queue', queue,
  'nonce', nonce, 'body', ARGV[3], 'tenant', ARGV[4], 'deadline', ARGV[5], 'choices', ARGV[6],
  'prompt_tokens', prompt_tokens)
redis.call('PEXPIRE', req, OPEN_TTL)
add_waiting_tokens(load, prompt_tokens)
if idem_ttl > 0 then redis.call('SET', idem, rid, 'PX', idem_ttl) end
return {1, rid}
