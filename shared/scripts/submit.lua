-- Accepts a request: metadata, queue entry and a place in the waiting order, all or nothing.
-- KEYS  1 req (hash)  2 log (unused here; as in restore)  3 queue (stream)  4 load (hash)
--       5 idem (string; only used when ARGV 15 > 0)  6 limit (hash)  7 open (set)  8 own bell of ARGV 12 (list)
-- ARGV  1 rid  2 nonce of this call  3 body  4 tenant  5 deadline ms (0 = none)  6 choices  7 prompt tokens
--       8 share: whose fair share it comes out of  9 its weight  10 priority  11 output tokens at most
--       12 consumer that has its prefix ('' = none)
--       13 max waiting requests  14 max waiting prompt tokens  15 ttl of idem in ms (0 = no idempotency key)
--       16 request key prefix of the shard  17 ms for which it is kept for ARGV 12
--       18, 19, 20 limits of the share: requests and tokens a minute, open requests (0 = none)
-- Reply {1, rid} accepted, with limits a minute also {…, requests used, tokens used} · {0, rid} attached to an earlier
--       request · {-1, retry after s, waiting, tokens waiting} full
--       {-2, which limit (1 requests, 2 tokens, 3 open), retry after ms, requests used, tokens used}
-- Why   The nonce tells a replay of this very call (its reply was lost; accepted) from another call with the same rid
--       (attached). An idempotency key whose request has expired is free again. The waiting-token counter heals itself
--       whenever nothing waits. Limits are looked at and used in the same call, so they hold over all pods.
-- @include _order
-- @include _limits

local req, queue, load, idem, limit, open = KEYS[1], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local rid, nonce, prompt_tokens, share = ARGV[1], ARGV[2], tonumber(ARGV[7]), ARGV[8]
local idem_ttl, rpm, tpm, most_open = tonumber(ARGV[15]), tonumber(ARGV[18]), tonumber(ARGV[19]), tonumber(ARGV[20])
local now = redis_ms()

local known = redis.call('HMGET', req, 'nonce', 'limits_seen')
if known[1] then
  local seen = known[1] == nonce and known[2] and cmsgpack.unpack(known[2]) or {}
  return {known[1] == nonce and 1 or 0, rid, seen[1], seen[2]}
end
if idem_ttl > 0 then
  local earlier = redis.call('GET', idem)
  if earlier and redis.call('EXISTS', ARGV[16] .. earlier) == 1 then return {0, earlier} end
end

local out = tonumber(redis.call('HGET', share_key(queue, share), 'out') or USUAL_OUT)
local guess = prompt_tokens + math.floor(math.min(tonumber(ARGV[11]), out * ARGV[6]))
local requests, tokens_used = used_now(limit, 'requests', rpm, now), used_now(limit, 'tokens', tpm, now)
local function refuse(which, ms)
  return {-2, which, ms, math.ceil(requests), math.ceil(tokens_used)}
end
local requests_ms, tokens_ms = ms_until(requests, 1, rpm), ms_until(tokens_used, guess, tpm)
if requests_ms > 0 and requests_ms >= tokens_ms then return refuse(1, requests_ms) end
if tokens_ms > 0 then return refuse(2, tokens_ms) end
if not may_open(open, ARGV[16], most_open) then return refuse(3, 1000) end

local waiting = waiting_and_running(queue)
local tokens = tonumber(redis.call('HGET', load, 'tokens') or 0)
if waiting == 0 and tokens ~= 0 then
  redis.call('HSET', load, 'tokens', 0)
  tokens = 0
end
-- A lone request larger than the token limit is let in: refusing it for ever would not be back-pressure.
local too_many = waiting + 1 - ARGV[13]
local too_long = waiting > 0 and tokens + prompt_tokens - ARGV[14] or 0
if too_many > 0 or too_long > 0 then
  local requests_per_s, tokens_per_s = drain_rate(load, now)
  local seconds = 10 -- nothing has finished yet: no measure
  if requests_per_s then seconds = math.max(too_many / requests_per_s, too_long / tokens_per_s) end
  return {-1, math.ceil(math.min(60, math.max(1, seconds))), waiting, tokens}
end

local entry = redis.call('XADD', queue, '*', 'rid', rid)
redis.call('HSET', req, 'state', 'open', 'epoch', 0, 'owner', '', 'next', 0, 'tries', 0, 'entry', entry, 'queue', queue,
  'nonce', nonce, 'body', ARGV[3], 'tenant', ARGV[4], 'deadline', ARGV[5], 'choices', ARGV[6],
  'prompt_tokens', prompt_tokens, 'share', share, 'weight', ARGV[9], 'priority', ARGV[10], 'max_out', ARGV[11])
if ARGV[12] ~= '' then redis.call('HSET', req, 'prefer', ARGV[12], 'offer', now + ARGV[17]) end
local reply = {1, rid}
if rpm > 0 or tpm > 0 then
  if rpm > 0 then set_used(limit, 'requests', requests + 1, now) end
  if tpm > 0 then
    set_used(limit, 'tokens', tokens_used + guess, now)
    redis.call('HSET', req, 'limit', limit, 'guess', guess, 'per_minute', tpm)
  end
  reply[3], reply[4] = math.ceil(requests + 1), math.ceil(tokens_used + guess)
  redis.call('HSET', req, 'limits_seen', cmsgpack.pack({reply[3], reply[4]}))
end
if most_open > 0 then
  redis.call('HSET', req, 'open', open)
  redis.call('SADD', open, rid)
  redis.call('PEXPIRE', open, OPEN_TTL)
end
redis.call('PEXPIRE', req, OPEN_TTL)
add_waiting_tokens(load, prompt_tokens)
enqueue(queue, load, share, tonumber(ARGV[10]), entry, rid)
if idem_ttl > 0 then redis.call('SET', idem, rid, 'PX', idem_ttl) end
if ARGV[12] ~= '' then ring(KEYS[8]) end
ring(beside(queue, PART.bell))
return reply
