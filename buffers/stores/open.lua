-- Take the run: this service becomes its only writer.
-- KEYS[1]  head hash (fields epoch, seq)
-- ARGV[1]  floor: the new epoch is at least this
-- ARGV[2]  an epoch that this process took already ('0': none): makes a repeated call harmless
-- Returns  {epoch, seq}
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
local seq = tonumber(redis.call('HGET', KEYS[1], 'seq') or '0')
local mine = tonumber(ARGV[2])
if mine == 0 or mine ~= epoch then
  epoch = math.max(epoch + 1, tonumber(ARGV[1]))
end
redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', epoch), 'seq', string.format('%.0f', seq))
return {epoch, seq}
