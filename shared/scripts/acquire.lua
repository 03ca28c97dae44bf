-- Makes the caller the one owner of a delivered entry: a new epoch, which fences every earlier owner.
-- KEYS  1 req (hash)  2 log (stream)  3 queue (stream)  4 load (hash)  5 dead (stream)
-- ARGV  1 rid  2 entry id  3 consumer  4 instance (this process)  5 nonce of this call  6 lease ms  7 max tries
--       8 retention ms  9 channel  10 ledger prefix
-- Reply {'RUN', epoch, next, tries, body} · {'LOST'} not pending with me · {'HELD'} another worker's lease is alive
--       {'GONE'} no metadata, {'CLOSED'} ended before or ended here; in both cases the entry was removed
-- Why   A redelivery (new group, failover) of running work is normal: the live lease decides. Cancelled, late and
--       poisonous requests end here, before any engine sees them. `tries` counts owners that went without committing
--       one record.
-- @include _terminal

local req, log, queue, load, dead = unpack(KEYS)
local rid, entry, consumer, instance, nonce = unpack(ARGV, 1, 5)
local lease, max_tries = tonumber(ARGV[6]), tonumber(ARGV[7])

local pending = redis.pcall('XPENDING', queue, GROUP, entry, entry, 1)
if pending.err or not pending[1] or pending[1][2] ~= consumer then return {'LOST'} end

local function forget(reply)
  redis.call('XACK', queue, GROUP, entry)
  redis.call('XDEL', queue, entry)
  return {reply}
end

local m = redis.call('HMGET', req, 'state', 'entry', 'owner', 'holder', 'epoch', 'next', 'tries', 'nonce_acquire',
  'lease', 'cancel', 'deadline', 'prompt_tokens')
local state, owner, holder, epoch, next_seq, tries = m[1], m[3], m[4], tonumber(m[5]), tonumber(m[6]), tonumber(m[7])
if not state then return forget('GONE') end
if state ~= 'open' or m[2] ~= entry then return forget('CLOSED') end -- m[2]: queued anew under another entry id

local function run()
  return {'RUN', epoch, next_seq, tries, redis.call('HGET', req, 'body')}
end
local mine = owner == epoch .. '.' .. instance
if mine and m[8] == nonce then return run() end -- the reply to this very call was lost

local now = redis_ms()
if not mine and holder and holder ~= consumer and m[9] and tonumber(m[9]) > now then return {'HELD'} end

local where = {req = req, log = log, queue = queue, load = load, channel = ARGV[9], ledger_prefix = ARGV[10],
  retention = ARGV[8]}
if m[10] then
  end_request(where, '', '')
  return {'CLOSED'}
end
local deadline = tonumber(m[11])
if deadline > 0 and now > deadline and next_seq == 0 then
  end_request(where, 'deadline_exceeded', 'The deadline passed before the request could start.')
  return {'CLOSED'}
end
if not mine and tries >= max_tries then
  local message = 'The request ended the worker that ran it, ' .. tries .. ' times in a row; it was not tried again.'
  dead_letter(dead, rid, queue, req, 'request_poisoned', message)
  end_request(where, 'request_poisoned', message)
  return {'CLOSED'}
end

if owner == '' then add_waiting_tokens(load, 0 - m[12]) end
epoch = epoch + 1
tries = mine and math.max(1, tries) or tries + 1 -- a process that asks again has not died
redis.call('HSET', req, 'epoch', epoch, 'owner', epoch .. '.' .. instance, 'holder', consumer, 'tries', tries,
  'nonce_acquire', nonce, 'lease', now + lease)
redis.call('PEXPIRE', req, OPEN_TTL)
redis.call('PEXPIRE', log, OPEN_TTL)
redis.call('XCLAIM', queue, GROUP, consumer, 0, entry, 'IDLE', 0, 'JUSTID')
return run()
