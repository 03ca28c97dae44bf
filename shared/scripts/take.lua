-- Gives a worker the waiting requests whose turn it is, as many as it has room for, and claims their entries for it.
-- KEYS  1 seat of the caller (hash), then per class, interactive first: queue (stream), load (hash)
-- ARGV  1 consumer  2 nonce of this call  3 room: choices that may start here  4 room for batch ones among them
--       5 request key prefix  6 seat key prefix of the model
--       7 instance of the caller  8 lease ms  9 how many requests may begin in this call
--       10 reserve: the last so many interactive choices are not for the shares named next (those that have many here)
-- Reply {ms until a request is free that is kept for another worker; 0 = none is, then five for each: entry id, rid,
--       class number, epoch (0 = still to be acquired), body of one that has begun}
-- Why   The stream knows arrival only. An entry leaves the order and enters the pending list in one call, so it is
--       never forgotten and never given to two. One offered to another worker (its prefix is cached there) is kept for
--       that one while it has room and the time is not up. Entries that the order does not know (another version's, or
--       the index was lost) are put into it first. The same call again (its reply was lost) gets the same answer. The
--       reserve keeps a share from filling every seat. Of requests that came just now the caller gets what levels all
--       workers' empty seats. One with nothing for acquire to find out begins here, a call earlier.
-- @include _order

local seat, consumer, nonce, prefix, seats = KEYS[1], ARGV[1], ARGV[2], ARGV[5], ARGV[6]
local instance, lease, begin, reserve = ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local has_many, spared = {}, false
for i = 11, #ARGV do has_many[ARGV[i]] = true end
local now = redis_ms()
local MOST, WINDOW, BLOCKED, PASSES = 32, 8, 32, 8
local SHARED_MS, OTHERS, UNEVEN, MOST_UNEVEN = 30, 64, 1 / 8, 2
local PAGE, SCAN_EVERY, SCAN_AGAIN, SEAT_FRESH = 100, 10000, 1000, 3000
local last = redis.call('HMGET', seat, 'nonce', 'reply')
if last[1] == nonce then
  local again = cmsgpack.unpack(last[2])
  for i = 2, #again, 5 do
    local m = redis.call('HMGET', prefix .. again[i + 1], 'owner', 'body')
    if again[i + 3] > 0 and m[1] == again[i + 3] .. '.' .. instance then
      again[i + 4] = m[2]
    else
      again[i + 3] = 0
    end
  end
  return again
end

local function forget(queue, entry)
  redis.pcall('XACK', queue, GROUP, entry)
  redis.call('XDEL', queue, entry)
end

local function is_pending(queue, entry)
  return redis.call('XPENDING', queue, GROUP, entry, entry, 1)[1] ~= nil
end

-- An entry that waits for nobody: back into the order, or to the consumer "nobody" when it had been started. Returns
-- true for one that is left to its owner, whose next renewal takes it back.
local function mend(queue, load, entry, fields)
  local rid = fields[1] == 'rid' and fields[2] or ''
  local m = redis.call('HMGET', prefix .. rid, 'state', 'entry', 'owner', 'lease', 'share', 'priority', 'tries')
  local share, priority = m[5] or '', tonumber(m[6] or 0)
  local known = #rid == RID_LENGTH and m[1] == 'open' and m[2] == entry
  if known and redis.call('ZSCORE', beside(queue, PART.wait), waiting_member(share, priority, entry, rid)) then
    enqueue(queue, load, share, priority, entry, rid, true) -- its share may have lost its turn
    return false
  end
  if is_pending(queue, entry) then return false end
  if m[3] ~= '' and m[4] and tonumber(m[4]) > now then return true end
  if not known then
    forget(queue, entry)
  elseif m[3] ~= '' or m[7] ~= '0' then
    redis.call('XCLAIM', queue, GROUP, NOBODY, 0, entry, 'IDLE', OPEN_TTL, 'FORCE', 'JUSTID')
  else
    enqueue(queue, load, share, priority, entry, rid, true)
  end
  return false
end

-- Looks at a page of the stream when entries are missing from order and pending list, and now and then anyway, because
-- ids of entries that are gone hide the difference.
local function look_for_lost(queue, load, pending)
  local m = redis.call('HMGET', load, 'scan', 'scanned', 'left')
  local since, left = now - tonumber(m[2] or 0), tonumber(m[3] or 0)
  local missing = redis.call('XLEN', queue) > pending + redis.call('ZCARD', beside(queue, PART.wait))
  local due = missing and (left == 0 or since > SCAN_AGAIN) or since > SCAN_EVERY
  if not m[1] and not due then return end
  if not m[1] then left = 0 end
  local page = redis.call('XRANGE', queue, m[1] or '-', '+', 'COUNT', PAGE)
  for _, item in ipairs(page) do
    if mend(queue, load, item[1], item[2]) then left = left + 1 end
  end
  if #page == PAGE then
    redis.pcall('HSET', load, 'scan', '(' .. page[#page][1], 'left', left)
  else
    redis.call('HDEL', load, 'scan')
    redis.pcall('HSET', load, 'scanned', now, 'left', left)
  end
  redis.call('PEXPIRE', load, LOAD_TTL)
end

local rooms = {}
local function has_room(other)
  if rooms[other] == nil then
    local m = redis.call('HMGET', seats .. other, 'room', 'at')
    rooms[other] = m[1] ~= false and tonumber(m[1]) > 0 and tonumber(m[2]) > now - SEAT_FRESH
  end
  return rooms[other]
end

local reply, taken = {0}, 0
local empty = tonumber(ARGV[4]) -- seats here; requests that are taken use these first
local rooms_of_all, own_bells = beside(KEYS[2], PART.room), string.match(beside(KEYS[2], PART.bell), '^.*:') .. '@'
local level, emptiest, withheld

-- Adds to `counts` how many requests each worker runs, or is about to.
local function count_pending(queue, counts)
  local summary = redis.pcall('XPENDING', queue, GROUP)
  for _, one in ipairs(not summary.err and summary[4] or {}) do
    counts[one[1]] = (counts[one[1]] or 0) + tonumber(one[2])
  end
  return counts
end

-- How many empty seats each worker keeps when what waits goes to those with the most; below 0: so many have none.
local function find_level(queue)
  local seen, counts, most = redis.call('HRANDFIELD', rooms_of_all, OTHERS, 'WITHVALUES'), {math.max(0, empty)}, 0
  local running = count_pending(KEYS[4], count_pending(KEYS[2], {}))
  for i = 1, #seen, 2 do
    local seats_there, at = string.match(seen[i + 1], '^(%d+) (%d+)$')
    if tonumber(at) < now - SEAT_TTL then
      redis.call('HDEL', rooms_of_all, seen[i])
    elseif seen[i] ~= consumer and tonumber(at) > now - SEAT_FRESH then
      local count = math.max(0, tonumber(seats_there) - (running[seen[i]] or 0))
      counts[#counts + 1] = count
      if count > most then most, emptiest = count, seen[i] end
    end
  end
  if not emptiest then return -math.huge end -- nobody else has a seat to leave it to
  table.sort(counts, function(a, b) return a > b end)
  local waiting = redis.call('ZCARD', beside(queue, PART.wait))
  local left, slack = waiting, math.min(MOST_UNEVEN, waiting * UNEVEN)
  for i, count in ipairs(counts) do
    local fills = i * (count - (counts[i + 1] or 0)) -- until those so far have no more than the next one
    if left <= fills then return math.max(0, count - left / i - slack) end
    left = left - fills
  end
  return -left
end

-- For how many ms a request that came just now is left to workers with more empty seats; 0 = it may be had here.
local function left_to_others(queue, entry)
  local young = tonumber(string.match(entry, '^%d+')) + SHARED_MS - now
  if young <= 0 then return 0 end
  level = level or find_level(queue)
  if empty > level then return 0 end
  withheld = true
  return young
end

-- What a member stands for: nil = nothing any more (it has left the order), else its request and how it may be had:
-- 'mine', 'free', 'second' (better for another worker) or 'kept' (for another worker, for now).
local function look_at(queue, member)
  local share, priority, entry, rid = read_member(member)
  local m = redis.call('HMGET', prefix .. rid, 'state', 'entry', 'choices', 'prompt_tokens', 'max_out', 'weight',
    'prefer', 'offer', 'passed', 'epoch', 'owner', 'next', 'tries', 'cancel', 'deadline')
  local gone = m[1] ~= 'open' or m[2] ~= entry
  if gone or is_pending(queue, entry) then
    leave_queue(queue, share, member)
    if gone and not is_pending(queue, entry) then forget(queue, entry) end
    return nil
  end
  local one = {share = share, priority = priority, entry = entry, rid = rid, member = member, how = 'free',
    choices = tonumber(m[3] or 1), prompt = tonumber(m[4]), max_out = tonumber(m[5] or m[3]),
    weight = tonumber(m[6] or 1), passed = tonumber(m[9] or 0), epoch = tonumber(m[10] or 0)}
  local deadline = tonumber(m[15] or 0)
  one.fresh = m[11] == '' and m[12] == '0' and m[13] == '0' and not m[14] and (deadline == 0 or now <= deadline)
  local prefer = m[7] or ''
  if prefer == consumer then
    one.how = 'mine'
  elseif prefer ~= '' and has_room(prefer) then
    one.how = 'second'
    local left = tonumber(m[8] or 0) - now
    if left > 0 then
      one.how, one.left = 'kept', left
    end
  end
  if one.how == 'free' or one.how == 'second' then
    local left = left_to_others(queue, entry)
    if left > 0 then one.how, one.left = 'kept', left end
  end
  return one
end

-- The one to take of a share's first members: in order, but one whose prefix is cached here may overtake some that are
-- better elsewhere, each of those a bounded number of times. nil = all are kept for others, false = look again.
local function choose(queue, share)
  local wait = beside(queue, PART.wait)
  local members = redis.call('ZRANGEBYLEX', wait, first_of(share), last_of(share), 'LIMIT', 0, WINDOW)
  local first, soonest
  for _, member in ipairs(members) do
    local one = look_at(queue, member)
    if not one then return false end
    if one.how == 'kept' then
      if not soonest or one.left < soonest then soonest = one.left end
    elseif not first then
      first = one
      if one.how ~= 'second' or one.passed >= PASSES then break end
    elseif one.how == 'mine' and one.priority == first.priority then
      redis.call('HINCRBY', prefix .. first.rid, 'passed', 1)
      first = one
      break
    end
  end
  if not first and soonest and (reply[1] == 0 or soonest < reply[1]) then reply[1] = soonest end
  return first
end

-- What acquire does to a request that was never run. Returns its epoch and body; 0 and nothing where acquire is needed.
local function start(load, one)
  if begin <= 0 or not one.fresh then return 0, '' end
  begin = begin - 1
  local req, epoch = prefix .. one.rid, one.epoch + 1
  add_waiting_tokens(load, 0 - one.prompt)
  redis.call('HSET', req, 'epoch', epoch, 'owner', epoch .. '.' .. instance, 'holder', consumer, 'tries', 1,
    'nonce_acquire', nonce, 'lease', now + lease)
  redis.call('PEXPIRE', req, OPEN_TTL)
  return epoch, redis.call('HGET', req, 'body')
end

-- Moves the request from the order to the pending list; false = its entry was lost (the pod restores it).
local function give(class, queue, load, one)
  local claimed = redis.call('XCLAIM', queue, GROUP, consumer, 0, one.entry, 'FORCE', 'JUSTID')
  if #claimed == 0 then return leave_queue(queue, one.share, one.member) end
  local cost = charge(queue, load, one.share, one.weight, one.prompt, one.choices, one.max_out)
  redis.call('HSET', prefix .. one.rid, 'charged', string.format('%.3f', cost))
  leave_queue(queue, one.share, one.member)
  taken = taken + 1
  empty = empty - one.choices
  local epoch, body = start(load, one)
  for _, value in ipairs({one.entry, one.rid, class, epoch, body}) do reply[#reply + 1] = value end
  return one.choices
end

-- Takes from one queue until the room is used; returns what is left of it.
local function take(class, queue, load, room)
  if redis.call('EXISTS', queue) == 0 then
    redis.call('DEL', beside(queue, PART.wait), beside(queue, PART.turn))
    return room
  end
  local summary = redis.pcall('XPENDING', queue, GROUP)
  if summary.err then
    redis.call('XGROUP', 'CREATE', queue, GROUP, 0)
    summary = {0}
  end
  look_for_lost(queue, load, summary[1])
  level = nil
  local turn, blocked, tries = beside(queue, PART.turn), 0, 0
  while room > 0 and taken < MOST and blocked < BLOCKED and tries < 4 * MOST do
    tries = tries + 1
    -- Shares that have only what is kept for others stay in front; whoever is served moves behind.
    local share = redis.call('ZRANGE', turn, blocked, blocked)[1]
    if not share then break end
    local one = nil
    if class == 1 and room <= reserve and has_many[share] then
      spared = true
    else
      one = choose(queue, share)
    end
    if one then
      room = room - (give(class, queue, load, one) or 0)
    elseif one == nil then
      blocked = blocked + 1
      if redis.call('ZLEXCOUNT', beside(queue, PART.wait), first_of(share), last_of(share)) == 0 then
        redis.call('ZREM', turn, share)
        blocked = blocked - 1
      end
    end
  end
  return room
end

local room, batch_room = tonumber(ARGV[3]), tonumber(ARGV[4])
local left = take(1, KEYS[2], KEYS[3], room)
local batch_left = take(2, KEYS[4], KEYS[5], math.min(left, batch_room - (room - left)))

-- For what did not fit here the next idle worker is woken. One with room left took all there was for it, and sleeps on
-- this bell itself.
for i, full in ipairs({left <= 0 or taken >= MOST, batch_left <= 0 or taken >= MOST}) do
  local bell, queue = beside(KEYS[2 * i], PART.bell), KEYS[2 * i]
  if redis.call('ZCARD', beside(queue, PART.wait)) == 0 then
    redis.call('DEL', bell)
  elseif full then
    ring(bell)
  elseif spared and i == 1 then
    ring(beside(queue, PART.spare))
  end
end
if withheld and emptiest then ring(own_bells .. emptiest) end
local kept = {}
for i, value in ipairs(reply) do kept[i] = i % 5 == 1 and i > 1 and '' or value end -- without the bodies
-- Not needed for safety, so a full Redis may refuse it: nothing was taken then, or this would not be the first write.
redis.pcall('HSET', seat, 'nonce', nonce, 'reply', cmsgpack.pack(kept), 'room', math.max(0, left), 'at', now)
redis.pcall('PEXPIRE', seat, SEAT_TTL)
local running = count_pending(KEYS[4], count_pending(KEYS[2], {}))[consumer] or 0
redis.pcall('HSET', rooms_of_all, consumer, math.max(0, empty) + running .. ' ' .. now)
redis.pcall('PEXPIRE', rooms_of_all, SEAT_TTL)
return reply
