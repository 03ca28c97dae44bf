-- How full the queues of one model are. Reads only.
-- KEYS  per class: queue (stream), load (hash)
-- ARGV  none
-- Reply {waiting, running, prompt tokens waiting}, summed over the classes
-- Why   One instant, not one per command. Group lag is wrong after trims and deletions, so nothing here uses it.
-- @include _load

local total = {0, 0, 0}
for i = 1, #KEYS, 2 do
  local waiting, running = waiting_and_running(KEYS[i])
  total[1], total[2] = total[1] + waiting, total[2] + running
  if waiting > 0 then total[3] = total[3] + tonumber(redis.call('HGET', KEYS[i + 1], 'tokens') or 0) end
end
return total
