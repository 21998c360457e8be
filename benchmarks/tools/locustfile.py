"""Users who chat, for locust: each streams an answer, and its times to the first output and to the last are reported.

    locust -f benchmarks/tools/locustfile.py --host http://127.0.0.1:8000 --headless -u 8 -r 8 --run-time 30s

Locust's own figure for a streamed request ends at its headers, which come before the first token does: it stands in the
table as `POST`, `TTFT` and `E2E` stand beside it. `SOL_PROMPTS` (a file of JSON lines with `prompt`), `SOL_MODEL`,
`SOL_MAX_TOKENS` and `SOL_EXTRA_BODY` (JSON) set what is asked.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

from locust import HttpUser, events, task

_PROMPTS = os.environ.get("SOL_PROMPTS")
PROMPTS = (
    [json.loads(line)["prompt"] for line in Path(_PROMPTS).read_text().splitlines() if line.strip()]
    if _PROMPTS
    else ["Tell me of a river in spring.", "Name five towns by the sea.", "What is a queue?"]
)
_next = itertools.cycle(PROMPTS)
"""One for all users: two of them do not ask the same at the same time."""


class Chatter(HttpUser):
    """Asks, reads to the end, asks again."""

    @task
    def chat(self) -> None:
        body: dict[str, Any] = {
            "model": os.environ.get("SOL_MODEL", "simulated"),
            "messages": [{"role": "user", "content": next(_next)}],
            "max_tokens": int(os.environ.get("SOL_MAX_TOKENS", "64")),
            "stream": True,
            **json.loads(os.environ.get("SOL_EXTRA_BODY", "{}")),
        }
        begin = time.perf_counter()
        first = last = None
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, catch_response=True, name="POST"
        ) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}: {response.text[:200]}")
                return
            finished = False
            for line in response.iter_lines(decode_unicode=True):
                if line == "data: [DONE]":
                    finished = True
                elif line.startswith("data: "):
                    choices = json.loads(line[6:]).get("choices") or ()
                    if any(choice["delta"].get("content") for choice in choices):
                        last = time.perf_counter()
                        first = first or last
            if not finished or first is None or last is None:
                response.failure("the stream ended without [DONE], or without text")
                return
            response.success()
        self._report("TTFT", first - begin)
        self._report("E2E", last - begin)

    def _report(self, name: str, seconds: float) -> None:
        events.request.fire(
            request_type="stream", name=name, response_time=1000 * seconds, response_length=0, exception=None,
            context={},
        )  # fmt: skip
