-- Take the lease of a run if it is free.
-- KEYS[1]  lease hash (fields token, and what the holder says of itself); it expires
-- ARGV[1]  token of the process that asks
-- ARGV[2]  milliseconds until the lease expires
-- ARGV[3]  token of a holder that is replaced ('': none)
-- ARGV[4 ..]  field, value of what the process says of itself
-- Returns  {} if it is taken, else the fields of its holder
local token = redis.call('HGET', KEYS[1], 'token')
if token and token ~= ARGV[1] and token ~= ARGV[3] then return redis.call('HGETALL', KEYS[1]) end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'token', ARGV[1], unpack(ARGV, 4))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {}
