-- Take a reservation from all its limits, or from none.
-- KEYS: open reservations, this reservation, then of each limit its hash and its list
-- ARGV: now (ms; empty: the server's clock), window (quanta), quantum (ms), lease (ms), id, tokens, info,
--       then of each limit its requests and its tokens (-1: none)
-- Returns {taken, which limit refused, ms to wait, then of each limit requests, tokens, ms until it is free}
local now, quanta, quantum_ms, lease = clock(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local id, tokens, info = ARGV[5], tonumber(ARGV[6]), ARGV[7]
local quantum = math.floor(now / quantum_ms)
local count = (#KEYS - 2) / 2
local sums, wait, worst = {}, -1, 0
local known = redis.call('EXISTS', KEYS[2]) == 1

for i = 1, count do
  local hash, list = KEYS[2 * i + 1], KEYS[2 * i + 2]
  local requests, used = current(hash, list, quantum - quanta - 1)
  sums[i] = {requests, used}
  local most_requests, most_tokens = tonumber(ARGV[6 + 2 * i]), tonumber(ARGV[7 + 2 * i])
  local over_requests = most_requests >= 0 and requests + 1 - most_requests or 0
  local over_tokens = most_tokens >= 0 and tokens > 0 and used + tokens - most_tokens or 0
  if not known and (over_requests > 0 or over_tokens > 0) then
    local free = (free_after(hash, list, over_requests, over_tokens) + quanta + 1) * quantum_ms - now
    if free > wait then wait, worst = free, i end
  end
end

local taken = worst == 0
if taken and not known then
  -- of all its windows, so that what is given back is found in each: their clocks are one
  for i = 1, count do
    local newest = redis.call('LINDEX', KEYS[2 * i + 2], -1)
    if newest and tonumber(newest) > quantum then quantum = tonumber(newest) end
  end
  local keep = (quanta + 2) * quantum_ms
  for i = 1, count do
    add(KEYS[2 * i + 1], KEYS[2 * i + 2], quantum, 1, tokens, keep)
    sums[i] = {sums[i][1] + 1, sums[i][2] + tokens}
  end
  redis.call('HSET', KEYS[2], 'state', 'open', 'quantum', quantum, 'charged', tokens, 'info', info, 'seen', '')
  redis.call('ZADD', KEYS[1], now + lease, id)
end

local answer = {taken and 1 or 0, worst, math.max(wait, 0)}
for i = 1, count do
  local newest = redis.call('LINDEX', KEYS[2 * i + 2], -1)
  local reset = newest and (tonumber(newest) + quanta + 1) * quantum_ms - now or 0
  answer[#answer + 1] = sums[i][1]
  answer[#answer + 1] = sums[i][2]
  answer[#answer + 1] = math.max(reset, 0)
end
return answer
