-- Completions for wrk: every connection asks for one after the other and reads it whole.
--
--     wrk -t1 -c8 -d10s --timeout 60s -s benchmarks/tools/completions.lua http://127.0.0.1:8000
--
-- SOL_MODEL, SOL_MAX_TOKENS and SOL_STREAM (true or false) set what is asked. wrk knows no first token: its latency is
-- that of the whole response, streamed or not. The last line is JSON, for programs.

local model = os.getenv("SOL_MODEL") or "simulated"
local max_tokens = os.getenv("SOL_MAX_TOKENS") or "16"
local stream = os.getenv("SOL_STREAM") or "true"
local number = 0

function request()
  number = number + 1
  local body = string.format(
    '{"model": "%s", "prompt": "%d: tell me of a river in spring.", "max_tokens": %s, "stream": %s, "ignore_eos": true}',
    model, number, max_tokens, stream)
  return wrk.format("POST", "/v1/completions", {["Content-Type"] = "application/json"}, body)
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '{"requests": %d, "seconds": %.6f, "errors": %d, "p50": %.6f, "p90": %.6f, "p95": %.6f, "p99": %.6f}\n',
    summary.requests, summary.duration / 1e6,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout,
    latency:percentile(50) / 1e6, latency:percentile(90) / 1e6, latency:percentile(95) / 1e6,
    latency:percentile(99) / 1e6))
end
