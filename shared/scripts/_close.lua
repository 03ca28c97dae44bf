-- Closes a request whose terminal record has just been appended (included by commit and _terminal): state, queue
-- entry, ledger, drain measure, fair share and limits in the same call, so that no sweep finds one without the other.
-- Never publishes.
-- ledger  hash  requests, prompt_tokens, completion_tokens of one tenant on one UTC day; Redis's day, not the caller's.
-- @include _order
-- @include _limits

-- YYYYMMDD of Unix seconds: Hinnant, "chrono-Compatible Low-Level Date Algorithms", civil_from_days.
local function utc_day(seconds)
  local f = math.floor
  local z = f(seconds / 86400) + 719468
  local era = f(z / 146097)
  local doe = z - era * 146097
  local yoe = f((doe - f(doe / 1460) + f(doe / 36524) - f(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + f(yoe / 4) - f(yoe / 100))
  local mp = f((5 * doy + 2) / 153)
  local day = doy - f((153 * mp + 2) / 5) + 1
  local month = mp < 10 and mp + 3 or mp - 9
  return string.format('%04d%02d%02d', yoe + era * 400 + (month <= 2 and 1 or 0), month, day)
end

-- What was guessed when the request was taken (fair share) and submitted (limits) becomes what it was.
local function settle_accounts(req, queue, load, now, tokens, completion_tokens, cached_tokens)
  local m = redis.call('HMGET', req, 'share', 'weight', 'charged', 'choices', 'owner', 'priority', 'entry', 'limit',
    'open', 'guess', 'per_minute')
  local share, rid = m[1] or '', string.sub(req, -RID_LENGTH)
  if m[5] == '' then leave_queue(queue, share, waiting_member(share, tonumber(m[6] or 0), m[7], rid)) end
  if m[3] or completion_tokens > 0 then
    settle(queue, load, share, tonumber(m[2] or 1), tonumber(m[3] or 0), tokens - cached_tokens, completion_tokens,
      tonumber(m[4]))
  end
  if m[9] then redis.call('SREM', m[9], rid) end
  if m[8] then -- what ended before it was taken gives all of it back
    local really = m[3] and tokens or completion_tokens
    set_used(m[8], 'tokens', used_now(m[8], 'tokens', tonumber(m[11]), now) + really - tonumber(m[10]), now)
  end
end

local function close_request(req, log, queue, load, ledger_prefix, prompt_tokens, completion_tokens, cached_tokens,
    retention)
  local m = redis.call('HMGET', req, 'entry', 'tenant')
  redis.call('HSET', req, 'state', 'done')
  redis.call('HDEL', req, 'lease')
  redis.call('XACK', queue, GROUP, m[1])
  redis.call('XDEL', queue, m[1])
  redis.call('PEXPIRE', req, retention)
  redis.call('PEXPIRE', log, retention)
  local now = redis_ms()
  local ledger = ledger_prefix .. utc_day(now / 1000) .. ':' .. (m[2] or '')
  redis.call('HINCRBY', ledger, 'requests', 1)
  redis.call('HINCRBY', ledger, 'prompt_tokens', prompt_tokens)
  redis.call('HINCRBY', ledger, 'completion_tokens', completion_tokens)
  redis.call('PEXPIRE', ledger, LEDGER_TTL)
  note_finish(load, now, prompt_tokens)
  settle_accounts(req, queue, load, now, prompt_tokens + completion_tokens, tonumber(completion_tokens),
    tonumber(cached_tokens))
end
