-- What a request came to. Less than was reserved goes back to the moment it was taken in, more is added now.
-- KEYS: open reservations, this reservation, then of each limit its hash and its list
-- ARGV: now (ms; empty: the server's clock), window (quanta), quantum (ms), retention (ms), id, tokens, requests
-- Returns 1 the first time, 0 after that
local now, quanta, quantum_ms = clock(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local tokens, requests = tonumber(ARGV[6]), tonumber(ARGV[7])
local entry = redis.call('HMGET', KEYS[2], 'state', 'quantum', 'charged')
if entry[1] == 'settled' then return 0 end
local quantum = math.floor(now / quantum_ms)
local keep = (quanta + 2) * quantum_ms

for i = 1, (#KEYS - 2) / 2 do
  local hash, list = KEYS[2 * i + 1], KEYS[2 * i + 2]
  current(hash, list, quantum - quanta - 1)
  if not entry[1] then  -- reserved elsewhere, or before the server lost its memory
    if requests > 0 or tokens > 0 then add(hash, list, quantum, requests, tokens, keep) end
  else
    local charged = tonumber(entry[3])
    if redis.call('HEXISTS', hash, 't' .. entry[2]) == 1 then
      change(hash, entry[2], requests - 1, math.min(0, tokens - charged))
    end
    if tokens > charged then add(hash, list, quantum, 0, tokens - charged, keep) end
  end
end
redis.call('DEL', KEYS[2])
redis.call('HSET', KEYS[2], 'state', 'settled')
redis.call('PEXPIRE', KEYS[2], tonumber(ARGV[4]))
redis.call('ZREM', KEYS[1], ARGV[5])
return 1
