-- Removes consumers that are surely gone: nothing pending and silent for long.
-- KEYS  1 queue (stream)
-- ARGV  1 idle ms a consumer must have reached
-- Reply number removed
-- Why   XGROUP DELCONSUMER throws pending entries away for ever; only an atomic look at "pending = 0" makes it safe.

local removed = 0
local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], GROUP)
if consumers.err then return 0 end -- no stream or group: nobody to remove
for _, fields in ipairs(consumers) do
  local info = {}
  for i = 1, #fields, 2 do info[fields[i]] = fields[i + 1] end
  if info.pending == 0 and info.idle > tonumber(ARGV[1]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], GROUP, info.name)
    removed = removed + 1
  end
end
return removed
