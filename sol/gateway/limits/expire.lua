-- Give up what nobody has renewed for a lease.
-- KEYS: open reservations.  ARGV: now (ms; empty: the server's clock), retention (ms), how many at most,
--       what the key of a reservation begins with (in the slot of KEYS[1], as all keys are)
-- Returns {id, info, seen, id, info, seen, …}
local now, answer = clock(ARGV[1]), {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, tonumber(ARGV[3]))) do
  local key = ARGV[4] .. id
  local entry = redis.call('HMGET', key, 'state', 'info', 'seen')
  redis.call('ZREM', KEYS[1], id)
  if entry[1] == 'open' then
    redis.call('HSET', key, 'state', 'orphan')
    redis.call('PEXPIRE', key, tonumber(ARGV[2]))
    answer[#answer + 1] = id
    answer[#answer + 1] = entry[2]
    answer[#answer + 1] = entry[3]
  end
end
return answer
