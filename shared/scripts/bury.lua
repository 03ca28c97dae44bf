-- Ends a request with an error and keeps it as a dead letter: owner equal, else nothing.
-- KEYS  1 req (hash)  2 log (stream)  3 queue (stream)  4 load (hash)  5 dead (stream)
-- ARGV  1 rid  2 owner  3 code  4 message  5 retention ms  6 channel  7 ledger prefix
-- Reply 0 OK · 3 FENCED · 4 CLOSED (also: a replay) · 5 GONE
-- Why   The one way for a worker to give a request up for good; usage is what the log holds.
-- @include _terminal

local req, log, queue, load, dead = unpack(KEYS)
local m = redis.call('HMGET', req, 'owner', 'state')
if not m[1] then return 5 end
if m[1] ~= ARGV[2] then return 3 end
if m[2] ~= 'open' then return 4 end
dead_letter(dead, ARGV[1], queue, req, ARGV[3], ARGV[4])
end_request({req = req, log = log, queue = queue, load = load, channel = ARGV[6], ledger_prefix = ARGV[7],
  retention = ARGV[5]}, ARGV[3], ARGV[4])
return 0
