-- How full the queues of one model are. Reads only.
-- KEYS  per class: queue (stream), load (hash)
-- ARGV  none
-- Reply {waiting, running, prompt tokens waiting, expected wait in ms of a request queued now; -1 = not measured yet,
--       the classes taken together, then those waiting in the last class}
-- Why   One instant, not one per command. Group lag is wrong after trims and deletions, so nothing here uses it.
-- @include _load

local total, now, rate = {0, 0, 0, 0, 0}, redis_ms(), 0
for i = 1, #KEYS, 2 do
  local waiting, running = waiting_and_running(KEYS[i])
  total[1], total[2], total[5] = total[1] + waiting, total[2] + running, waiting
  if waiting > 0 then total[3] = total[3] + tonumber(redis.call('HGET', KEYS[i + 1], 'tokens') or 0) end
  rate = rate + (drain_rate(KEYS[i + 1], now) or 0)
end
if total[1] > 0 then total[4] = rate > 0 and math.ceil((total[1] + 1) * 1000 / math.max(rate, 0.001)) or -1 end
return total
