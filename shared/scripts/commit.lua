-- Appends records, each fenced, in order: log, next, then (terminal record) state, entry, ledger; publication last.
-- KEYS  1 queue 2 load of class interactive  3 queue 4 load of class batch, then per record: req (hash), log (stream)
-- ARGV  1 retention ms  2 ledger prefix, then per record 8: channel, owner, seq, payload, class (1, 2; 0 = not the last
--       record), prompt tokens, completion tokens, cached prompt tokens (of the terminal record)
-- Reply flat list, two per record: kind, next.  0 OK · 1 DUP (logged before) · 2 GAP (send from next) · 3 FENCED ·
--       4 CLOSED · 5 GONE
-- Why   Four commands a record, 25 us at most. A replayed terminal record is DUP, not CLOSED: to its owner it means
--       "done". The first record after an acquire resets `tries`: it is the proof that the request does not kill its
--       worker.

-- Made only for a terminal record: a dozen functions that every other call would make for nothing.
local function closing()
-- @include _close
  return close_request
end
local close

local OK, DUP, GAP, FENCED, CLOSED, GONE = 0, 1, 2, 3, 4, 5

local function append(req, log, a)
  local m = redis.call('HMGET', req, 'owner', 'next', 'state', 'tries')
  if not m[1] then return GONE, 0 end
  local next_seq, seq = tonumber(m[2]), tonumber(ARGV[a + 2])
  if m[1] ~= ARGV[a + 1] then return FENCED, next_seq end
  if seq < next_seq then return DUP, next_seq end
  if m[3] ~= 'open' then return CLOSED, next_seq end
  if seq > next_seq then return GAP, next_seq end

  redis.call('XADD', log, (seq + 1) .. '-0', 'd', ARGV[a + 3])
  if m[4] == '0' then
    redis.call('HSET', req, 'next', seq + 1)
  else
    redis.call('HSET', req, 'next', seq + 1, 'tries', 0)
  end
  if seq == 0 then redis.call('PEXPIRE', log, OPEN_TTL) end
  local class = tonumber(ARGV[a + 4])
  if class > 0 then
    close = close or closing()
    close(req, log, KEYS[2 * class - 1], KEYS[2 * class], ARGV[2], ARGV[a + 5], ARGV[a + 6],
      ARGV[a + 7], ARGV[1])
  end
  redis.call('PUBLISH', ARGV[a], ARGV[a + 3])
  return OK, seq + 1
end

local replies = {}
for i = 0, (#KEYS - 4) / 2 - 1 do
  replies[2 * i + 1], replies[2 * i + 2] = append(KEYS[5 + 2 * i], KEYS[6 + 2 * i], 3 + 8 * i)
end
return replies
