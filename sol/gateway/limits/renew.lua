-- The owner of these reservations is alive.
-- KEYS: open reservations, then the reservations
-- ARGV: now (ms; empty: the server's clock), lease (ms), then of each its id and what its owner has seen of it
local ends = clock(ARGV[1]) + tonumber(ARGV[2])
for i = 2, #KEYS do
  if redis.call('HGET', KEYS[i], 'state') == 'open' then
    redis.call('ZADD', KEYS[1], 'XX', ends, ARGV[2 * i - 1])
    redis.call('HSET', KEYS[i], 'seen', ARGV[2 * i])
  end
end
return 0
