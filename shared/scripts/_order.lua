-- The waiting order of one queue (included by submit, restore, take, position, tenants and _close): shares in turn by
-- tokens served, within a share by priority and arrival. Only an index: the stream is the truth and `take` mends this.
-- wait   zset  all scores 0: "<share> <priority> <entry id> <rid>" per waiting request, fixed width but for the share
-- turn   zset  shares with waiting requests -> virtual time: tokens served per weight
-- share  hash  v: its virtual time · out: usual output tokens of one choice
-- load   hash  v: the queue's virtual time, that of the share served last; never goes back
-- served zset  shares -> tokens served, to look at
-- Start-time fair queueing (Goyal, Vin, Cheng 1996) with tokens as the work, as in VTC (Sheng et al., OSDI 2024): a
-- share that was idle starts at the queue's own virtual time, so idling earns nothing.
-- @include _load

local USUAL_OUT, OUT_WEIGHT = 128, 0.2

local function beside(queue, part)
  local from, to = string.find(queue, PART.queue, 1, true)
  return string.sub(queue, 1, from - 1) .. part .. string.sub(queue, to + 1)
end

local function share_key(queue, share)
  return beside(queue, PART.share) .. ':' .. share
end

local function waiting_member(share, priority, entry, rid)
  local ms, seq = string.match(entry, '^(%d+)%-(%d+)$')
  return share .. ' ' .. string.format('%04d', priority + 5000) .. ' ' .. string.rep('0', 15 - #ms) .. ms .. '-' ..
    string.rep('0', 20 - #seq) .. seq .. ' ' .. rid
end

-- share (of any spelling), priority as in the member, entry id, rid
local function read_member(member)
  local share, priority, ms, seq, rid = string.match(member, '^(.*) (%d+) (%d+)%-(%d+) (%w+)$')
  return share, priority, string.match(ms, '^0*(%d+)$') .. '-' .. string.match(seq, '^0*(%d+)$'), rid
end

-- The bounds of one share's members: '!' follows the space.
local function first_of(share) return '[' .. share .. ' ' end
local function last_of(share) return '(' .. share .. '!' end

local function virtual_time(queue, load, share)
  local floor = tonumber(redis.call('HGET', load, 'v') or 0)
  return math.max(floor, tonumber(redis.call('HGET', share_key(queue, share), 'v') or floor))
end

local function put_virtual_time(queue, share, v)
  local key = share_key(queue, share)
  redis.call('HSET', key, 'v', string.format('%.3f', v))
  redis.call('PEXPIRE', key, LOAD_TTL)
  redis.call('ZADD', beside(queue, PART.turn), 'XX', string.format('%.3f', v), share)
end

local function ring(bell)
  if redis.call('LLEN', bell) == 0 then redis.call('RPUSH', bell, 1) end
  redis.call('PEXPIRE', bell, LOAD_TTL)
end

-- Makes an entry wait for its turn. Harmless when it does already. `again`: it did before the index was lost, so that
-- its share was not idle and keeps its virtual time.
local function enqueue(queue, load, share, priority, entry, rid, again)
  local wait, turn = beside(queue, PART.wait), beside(queue, PART.turn)
  redis.call('ZADD', wait, 0, waiting_member(share, priority, entry, rid))
  if not redis.call('ZSCORE', turn, share) then
    local key = share_key(queue, share)
    local v = again and redis.call('HGET', key, 'v') or virtual_time(queue, load, share)
    redis.call('ZADD', turn, string.format('%.3f', v), share)
    -- Kept beside the index, so that one made again gives the same turn.
    redis.call('HSET', key, 'v', string.format('%.3f', v))
    redis.call('PEXPIRE', key, LOAD_TTL)
  end
  redis.call('PEXPIRE', wait, LOAD_TTL)
  redis.call('PEXPIRE', turn, LOAD_TTL)
end

-- Takes a member out of the order, whatever became of its request.
local function leave_queue(queue, share, member)
  local wait = beside(queue, PART.wait)
  redis.call('ZREM', wait, member)
  if #redis.call('ZRANGEBYLEX', wait, first_of(share), last_of(share), 'LIMIT', 0, 1) == 0 then
    redis.call('ZREM', beside(queue, PART.turn), share)
  end
end

-- Counts a request as served before it is, so that nobody gets a second one on the first one's account. Returns its
-- cost.
local function charge(queue, load, share, weight, prompt_tokens, choices, max_out)
  local out = tonumber(redis.call('HGET', share_key(queue, share), 'out') or USUAL_OUT)
  local cost = prompt_tokens + math.min(max_out, out * choices)
  local floor = tonumber(redis.call('HGET', load, 'v') or 0)
  local start = tonumber(redis.call('ZSCORE', beside(queue, PART.turn), share) or virtual_time(queue, load, share))
  if start > floor then redis.call('HSET', load, 'v', string.format('%.3f', start)) end
  redis.call('PEXPIRE', load, LOAD_TTL)
  put_virtual_time(queue, share, start + cost / weight)
  return cost
end

-- Sets right what `charge` guessed, once the tokens are known (those found in a cache cost nothing).
local function settle(queue, load, share, weight, charged, tokens, completion_tokens, choices)
  local turn, key = beside(queue, PART.turn), share_key(queue, share)
  local before = tonumber(redis.call('ZSCORE', turn, share) or virtual_time(queue, load, share))
  put_virtual_time(queue, share, math.max(0, before + (tokens - charged) / weight))
  local out = tonumber(redis.call('HGET', key, 'out') or USUAL_OUT)
  redis.call('HSET', key, 'out', string.format('%.3f', out + OUT_WEIGHT * (completion_tokens / choices - out)))
  local served = beside(queue, PART.served)
  redis.call('ZINCRBY', served, tokens, share)
  if redis.call('ZCARD', served) > SERVED_MAX then redis.call('ZREMRANGEBYRANK', served, 0, -SERVED_MAX - 1) end
  redis.call('PEXPIRE', served, SERVED_TTL)
end
