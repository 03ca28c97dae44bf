-- How full a queue is and how fast it drains (included by _order and whoever counts).
-- load  hash  tokens: prompt tokens waiting · done, done_tokens: finished requests and prompt tokens, decayed with
--       RATE_TAU · at, since: Redis ms of the last and the first finish. Only a measure: losing it costs an estimate.

local RATE_TAU = 30000

local function redis_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- Entries nobody works on: not yet delivered, or handed back. Counted anew each time, so it cannot drift.
local function waiting_and_running(queue)
  local summary = redis.pcall('XPENDING', queue, GROUP)
  local running = 0
  if not summary.err then -- no group yet: nothing was delivered
    running = summary[1]
    for _, consumer in ipairs(summary[4] or {}) do
      if consumer[1] == NOBODY then running = running - consumer[2] end
    end
  end
  return math.max(0, redis.call('XLEN', queue) - running), running
end

-- Finished requests and prompt tokens per second, or nil before the first finish.
local function drain_rate(load, now)
  local m = redis.call('HMGET', load, 'done', 'done_tokens', 'at', 'since')
  if not m[4] then return nil end
  local decay = math.exp((m[3] - now) / RATE_TAU)
  -- What one unit per ms would have added since the first finish: without this a young measure would read too low.
  local window = math.max(1, RATE_TAU * (1 - math.exp((m[4] - now - 1000) / RATE_TAU)) / 1000)
  return m[1] * decay / window, m[2] * decay / window
end

local function note_finish(load, now, prompt_tokens)
  local m = redis.call('HMGET', load, 'done', 'done_tokens', 'at', 'since')
  local decay = m[3] and math.exp((m[3] - now) / RATE_TAU) or 0
  redis.call('HSET', load, 'done', string.format('%.6f', (m[1] or 0) * decay + 1),
    'done_tokens', string.format('%.3f', (m[2] or 0) * decay + prompt_tokens), 'at', now, 'since', m[4] or now)
  redis.call('PEXPIRE', load, LOAD_TTL)
end

local function add_waiting_tokens(load, tokens)
  if redis.call('HINCRBY', load, 'tokens', tokens) < 0 then redis.call('HSET', load, 'tokens', 0) end
  redis.call('PEXPIRE', load, LOAD_TTL)
end
