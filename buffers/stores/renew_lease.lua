-- Renew the lease of a run, if no other process has it and no newer service writes.
-- KEYS[1]  lease hash;  KEYS[2]  head hash (field epoch)
-- ARGV[1]  token of the holder
-- ARGV[2]  milliseconds until the lease expires; 0: it is given back
-- ARGV[3]  epoch of the service ('0': it has none yet)
-- ARGV[4 ..]  field, value of what the holder says of itself
-- Returns  'ok' or 'fenced'
local token = redis.call('HGET', KEYS[1], 'token')
if token and token ~= ARGV[1] then return 'fenced' end
local epoch = tonumber(redis.call('HGET', KEYS[2], 'epoch') or '0')
if ARGV[3] ~= '0' and epoch > tonumber(ARGV[3]) then return 'fenced' end
redis.call('HSET', KEYS[1], 'token', ARGV[1], unpack(ARGV, 4))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 'ok'
