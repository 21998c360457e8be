-- Shared by the scripts: the sliding window of one scope. Two keys hold it: a list of the quanta in which something was
-- taken, oldest first, and a hash with what was taken in each (r<quantum>, t<quantum>) and the sums (r, t).
-- Quanta, not single requests, so that a window has no more than 6,000 entries however many requests pass.

local function clock(given)
  if given ~= '' then return tonumber(given) end
  local time = redis.call('TIME')  -- the one clock that all replicas share
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function number(value)
  return tonumber(value or 0) or 0
end

-- Take out what is older than a window. Returns the sums of what is left.
local function current(hash, list, last_gone)
  local newest = redis.call('LINDEX', list, -1)
  if newest and tonumber(newest) <= last_gone then
    redis.call('DEL', hash, list)
    return 0, 0
  end
  local oldest = redis.call('LINDEX', list, 0)
  while oldest and tonumber(oldest) <= last_gone do
    local taken = redis.call('HMGET', hash, 'r' .. oldest, 't' .. oldest)
    redis.call('HINCRBY', hash, 'r', 0 - number(taken[1]))
    redis.call('HINCRBY', hash, 't', 0 - number(taken[2]))
    redis.call('HDEL', hash, 'r' .. oldest, 't' .. oldest)
    redis.call('LPOP', list)
    oldest = redis.call('LINDEX', list, 0)
  end
  local sums = redis.call('HMGET', hash, 'r', 't')
  return number(sums[1]), number(sums[2])
end

local function change(hash, quantum, requests, tokens)
  redis.call('HINCRBY', hash, 'r' .. quantum, requests)
  redis.call('HINCRBY', hash, 't' .. quantum, tokens)
  redis.call('HINCRBY', hash, 'r', requests)
  redis.call('HINCRBY', hash, 't', tokens)
end

-- Returns the quantum it was put in: a clock that was set back does not put the list out of order.
local function add(hash, list, quantum, requests, tokens, keep)
  local newest = redis.call('LINDEX', list, -1)
  if newest and tonumber(newest) >= quantum then
    quantum = tonumber(newest)
  else
    redis.call('RPUSH', list, quantum)
  end
  change(hash, quantum, requests, tokens)
  redis.call('PEXPIRE', hash, keep)
  redis.call('PEXPIRE', list, keep)
  return quantum
end

-- The quantum with which so many requests and so many tokens have left the window.
local function free_after(hash, list, requests, tokens)
  local start, last = 0, nil
  while true do
    local quanta = redis.call('LRANGE', list, start, start + 99)
    if #quanta == 0 then return last or 0 end
    for _, quantum in ipairs(quanta) do
      local taken = redis.call('HMGET', hash, 'r' .. quantum, 't' .. quantum)
      requests = requests - number(taken[1])
      tokens = tokens - number(taken[2])
      last = tonumber(quantum)
      if requests <= 0 and tokens <= 0 then return last end
    end
    start = start + 100
  end
end
