-- Cancels a request: ends it here when nobody runs it, else sets the flag and tells the workers.
-- KEYS  1 req (hash)  2 log (stream)  3 queue (stream)  4 load (hash)
-- ARGV  1 rid  2 retention ms  3 channel  4 control channel  5 ledger prefix
-- Reply 1 open until now · 0 unknown or already ended
-- Why   A waiting request must not wait for a worker to be told that it ended. For a running one the flag stays, so a
--       lost notification costs one renewal, and a take-over finds it.
-- @include _terminal

local req, log, queue, load = unpack(KEYS)
local m = redis.call('HMGET', req, 'state', 'owner', 'cancel')
if m[1] ~= 'open' then return 0 end
if m[2] == '' then
  end_request({req = req, log = log, queue = queue, load = load, channel = ARGV[3], ledger_prefix = ARGV[5],
    retention = ARGV[2]}, '', '')
  return 1
end
redis.call('HSET', req, 'cancel', 1)
redis.call('PUBLISH', ARGV[4], 'cancel:' .. ARGV[1])
return 1
