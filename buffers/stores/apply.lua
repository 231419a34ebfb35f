-- Write rows as one step, if this service is still the writer and the store holds what it wrote last.
-- KEYS[1]  head hash (fields epoch, seq)
-- KEYS[2]  rows hash
-- ARGV[1]  epoch of the service
-- ARGV[2]  sequence number of its last write, or 'reseed': delete all rows first, whatever was there
-- ARGV[3]  sequence number of this write
-- ARGV[4]  n, the number of rows to write
-- ARGV[5 .. 4 + 2n]  key, value of each;  the rest: keys of rows to delete
-- Returns  'ok'; 'done' where this write was applied before (its answer was lost);
--          'fenced' where a newer service took the run; 'lost' where the store was emptied or rolled back
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
local seq = redis.call('HGET', KEYS[1], 'seq') or ''
local mine = tonumber(ARGV[1])
if epoch > mine then return 'fenced' end
if ARGV[2] == 'reseed' then
  redis.call('DEL', KEYS[2])
else
  if epoch < mine then return 'lost' end
  if seq == ARGV[3] then return 'done' end
  if seq ~= ARGV[2] then return 'lost' end
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'seq', ARGV[3])
local last = 4 + 2 * tonumber(ARGV[4])
for first = 5, last, 1000 do  -- unpack has a limit of about 8000 values
  redis.call('HSET', KEYS[2], unpack(ARGV, first, math.min(first + 999, last)))
end
for first = last + 1, #ARGV, 1000 do
  redis.call('HDEL', KEYS[2], unpack(ARGV, first, math.min(first + 999, #ARGV)))
end
return 'ok'
