-- Queues an accepted request again after Redis lost its metadata (FLUSHALL) or its queue entry (XTRIM, DEL).
-- KEYS  1 req (hash)  2 log (stream)  3 queue (stream)  4 load (hash)
-- ARGV  1 rid  2 nonce of this call  3 body  4 tenant  5 deadline ms  6 choices  7 prompt tokens  8 share  9 its weight
--       10 priority  11 output tokens at most  12 unused (as in submit), then the records so far
-- Reply 1 queued again · 0 nothing was lost, or somebody else did it
-- Why   The pod that relays the stream holds the request and every record it has emitted; with both in place a worker
--       goes on where the client is. The epoch starts at the clock, above every epoch handed out before the loss. A
--       running request that only lost its entry is left alone: its owner's renewal adds one.
-- @include _order

local req, log, queue, load = unpack(KEYS)
local rid, nonce, prompt_tokens, share, priority = ARGV[1], ARGV[2], tonumber(ARGV[7]), ARGV[8], tonumber(ARGV[10])
local HEAD = 12

local function requeue(entry)
  enqueue(queue, load, share, priority, entry, rid)
  ring(beside(queue, PART.bell))
  return 1
end

local m = redis.call('HMGET', req, 'state', 'owner', 'entry', 'nonce', 'lease')
if m[1] then
  if m[4] == nonce then return 1 end
  local held = m[2] ~= '' and m[5] and tonumber(m[5]) > redis_ms()
  if m[1] ~= 'open' or held or #redis.call('XRANGE', queue, m[3], m[3]) > 0 then return 0 end
  local entry = redis.call('XADD', queue, '*', 'rid', rid)
  redis.call('HSET', req, 'entry', entry, 'nonce', nonce)
  leave_queue(queue, share, waiting_member(share, priority, m[3], rid))
  return requeue(entry)
end

-- The first write is one that a full Redis refuses: what follows a write is never refused.
local entry = redis.call('XADD', queue, '*', 'rid', rid)
redis.call('HSET', req, 'state', 'open', 'epoch', redis_ms(), 'owner', '', 'next', #ARGV - HEAD, 'tries', 0,
  'entry', entry, 'queue', queue, 'nonce', nonce, 'body', ARGV[3], 'tenant', ARGV[4], 'deadline', ARGV[5],
  'choices', ARGV[6], 'prompt_tokens', prompt_tokens, 'share', share, 'weight', ARGV[9], 'priority', ARGV[10],
  'max_out', ARGV[11])
redis.call('PEXPIRE', req, OPEN_TTL)
redis.call('DEL', log)
for i = HEAD + 1, #ARGV do
  redis.call('XADD', log, (i - HEAD) .. '-0', 'd', ARGV[i])
end
redis.call('PEXPIRE', log, OPEN_TTL)
add_waiting_tokens(load, prompt_tokens)
return requeue(entry)
