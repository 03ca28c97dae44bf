-- Appends records, each fenced, in order: log, next, then (terminal record) state, entry, ledger; publication last.
-- KEYS  1 queue 2 load of class interactive  3 queue 4 load of class batch
-- ARGV  1 retention ms  2 ledger prefix  3 req prefix  4 log prefix  5 channel prefix, then per record 5: rid, owner,
--       seq, payload, end: "" or, of the terminal record, "<class 1 or 2> <prompt> <completion> <cached prompt tokens>"
-- Reply flat list, two per record: kind, next.  0 OK · 1 DUP (logged before) · 2 GAP (send from next) · 3 FENCED ·
--       4 CLOSED · 5 GONE
-- Why   Four commands a record, 25 us at most; names are put together here, because every argument is packed, read and
--       copied for every token. A replayed terminal record is DUP, not CLOSED: to its owner it means
--       "done". The first record after an acquire resets `tries`: it is the proof that the request does not kill its
--       worker.

-- Made only for a terminal record: a dozen functions that every other call would make for nothing.
local function closing()
-- @include _close
  return close_request
end
local close

local OK, DUP, GAP, FENCED, CLOSED, GONE = 0, 1, 2, 3, 4, 5

local function append(rid, owner, seq_text, payload, ending)
  local req = ARGV[3] .. rid
  local m = redis.call('HMGET', req, 'owner', 'next', 'state', 'tries')
  if not m[1] then return GONE, 0 end
  local next_seq, seq = tonumber(m[2]), tonumber(seq_text)
  if m[1] ~= owner then return FENCED, next_seq end
  if seq < next_seq then return DUP, next_seq end
  if m[3] ~= 'open' then return CLOSED, next_seq end
  if seq > next_seq then return GAP, next_seq end

  local log = ARGV[4] .. rid
  redis.call('XADD', log, (seq + 1) .. '-0', 'd', payload)
  if m[4] == '0' then
    redis.call('HSET', req, 'next', seq + 1)
  else
    redis.call('HSET', req, 'next', seq + 1, 'tries', 0)
  end
  if seq == 0 then redis.call('PEXPIRE', log, OPEN_TTL) end
  if ending ~= '' then
    close = close or closing()
    local class, prompt, completion, cached = string.match(ending, '^(%d) (%d+) (%d+) (%d+)$')
    close(req, log, KEYS[2 * class - 1], KEYS[2 * class], ARGV[2], prompt, completion, cached, ARGV[1])
  end
  redis.call('PUBLISH', ARGV[5] .. rid, payload)
  return OK, seq + 1
end

local replies = {}
for a = 6, #ARGV, 5 do
  local n = #replies
  replies[n + 1], replies[n + 2] = append(ARGV[a], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4])
end
return replies
