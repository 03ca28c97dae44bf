-- Writes the terminal record of a request that no engine will end (included by cancel, acquire and bury): cancelled,
-- deadline passed, poisonous. Record layout and field names: shared/messages.py (Record, Delta, End, Usage).
-- @include _close

-- Which choices have a finish reason, and how many tokens the log holds. Pages, because a log can be long.
local function read_progress(log)
  local finished, tokens, from = {}, 0, '-'
  repeat
    local page = redis.call('XRANGE', log, from, '+', 'COUNT', 500)
    for _, entry in ipairs(page) do
      local readable, record = pcall(cmsgpack.unpack, entry[2][2]) -- an unreadable one must not keep the end away
      for _, delta in ipairs(readable and type(record) == 'table' and record.d or {}) do
        tokens = tokens + #(delta.t or {})
        if delta.f then finished[delta.i or 0] = true end
      end
      from = '(' .. entry[1]
    end
  until #page < 500
  return finished, tokens
end

-- where: {req, log, queue, load, channel, ledger_prefix, retention}. code '' = aborted, else an error code.
local function end_request(where, code, message)
  local m = redis.call('HMGET', where.req, 'next', 'choices', 'prompt_tokens', 'owner')
  local finished, completion = read_progress(where.log)
  local deltas = {}
  if code == '' then
    for i = 0, m[2] - 1 do
      if not finished[i] then deltas[#deltas + 1] = {i = i, f = 'abort'} end
    end
  end
  local record = cmsgpack.pack({n = tonumber(m[1]), d = deltas, e = {code = code, message = message,
    usage = {prompt_tokens = tonumber(m[3]), completion_tokens = completion}}})
  if m[4] == '' then add_waiting_tokens(where.load, 0 - m[3]) end
  redis.call('XADD', where.log, (m[1] + 1) .. '-0', 'd', record)
  redis.call('HSET', where.req, 'next', m[1] + 1)
  close_request(where.req, where.log, where.queue, where.load, where.ledger_prefix, m[3], completion, 0,
    where.retention)
  redis.call('PUBLISH', where.channel, record)
end

-- Keeps the body, so that `headrace dead replay` works after the request's own keys are gone.
local function dead_letter(dead, rid, queue, req, code, message)
  local m = redis.call('HMGET', req, 'body', 'tenant', 'tries')
  redis.call('XADD', dead, 'MAXLEN', '~', DEAD_MAX, '*', 'rid', rid, 'queue', queue, 'code', code, 'message', message,
    'tenant', m[2] or '', 'tries', m[3] or 0, 'body', m[1])
  redis.call('PEXPIRE', dead, DEAD_TTL)
end
