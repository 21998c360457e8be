"""What clients make up does not pile up: names, keys, ids and prompts that nobody sent before leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import types
import uuid
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_harness import CHAT, COMPLETION, Running, running

from sol.gateway.limits import estimate, keys
from sol.gateway.limits.estimate import _Recent
from sol.gateway.limits.memory import _Window
from sol.gateway.limits.stage import LimitStage
from sol.gateway.routing.breaker import Breaker

_BOUNDED = (Breaker, _Window, _Recent)
"""By time (half a minute, a minute) or number; they go on filling up in a test."""
_NOT_OURS = (
    asyncio.AbstractEventLoop,
    logging.Logger,
    type,
    types.ModuleType,
    types.FunctionType,
    types.CodeType,
    types.BuiltinFunctionType,
)


def entries_behind(root: object) -> int:
    """Entries of all containers that can be reached from an object, but for what classes, modules and logs hold."""
    gc.collect()
    seen: set[int] = set()
    waiting: list[object] = [root]
    total = 0
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (_BOUNDED, _NOT_OURS)):
            continue
        seen.add(id(item))
        if isinstance(item, (dict, list, set, tuple, frozenset)) or hasattr(item, "popleft"):
            total += len(item)  # type: ignore[arg-type]
        waiting += gc.get_referents(item)
    return total


async def made_up(it: Running, number: int) -> None:
    """One of everything that a client can name, all new."""
    draw = random.Random(number)
    fresh = uuid.UUID(int=draw.getrandbits(128)).hex
    key = {"authorization": "Bearer good"}
    named = {
        "x-request-id": fresh, "x-sol-task": fresh, "traceparent": f"00-{fresh}-{fresh[:16]}-01", "x-made-up": fresh,
        "x-stainless-retry-count": "0", "x-sol-class": fresh,
    }  # fmt: skip
    long = [{"role": "system", "content": f"{fresh} " * 60}, {"role": "user", "content": "Hello"}]
    posts: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("/v1/chat/completions", {**CHAT, "max_tokens": 1, "messages": long, "user": fresh}, {**key, **named}),
        ("/v1/completions", {**COMPLETION, "max_tokens": 1, "prompt": fresh}, {**key, "idempotency-key": fresh}),
        ("/v1/completions", {**COMPLETION, "model": fresh}, key),
        ("/v1/completions", {**COMPLETION, "service_tier": fresh}, key),
        ("/v1/completions", COMPLETION, {"authorization": f"Bearer {fresh}"}),
        ("/v1/completions", {**COMPLETION, fresh: fresh, "temperature": -1}, key),
        (f"/v1/{fresh}", {}, key),
    ]
    await asyncio.gather(*(it.http.post(path, json=body, headers=headers) for path, body, headers in posts))
    await it.http.get(f"/v1/models/{fresh}", headers=key)
    with contextlib.suppress(httpx.ReadTimeout):
        left = {**COMPLETION, "max_tokens": 500, "ignore_eos": True, "prompt": fresh}
        async with it.http.stream("POST", "/v1/completions", json={**left, "stream": True}, headers=key) as response:
            async for _ in response.aiter_raw():
                break


async def test_names_that_clients_make_up_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is remembered of the latest is bounded by numbers that a test would take long to reach.
    monkeypatch.setattr(keys, "_UNKNOWN", 20)
    monkeypatch.setattr(estimate, "_PAIRS", 20)
    sections: dict[str, Any] = {
        "keys": [{"key": "good", "tenant": "t"}],
        "limits": {"default_tenant": {"requests_per_minute": 10**6, "tokens_per_minute": 10**9}},
        "database": {"url": f"sqlite:///{tmp_path}/sol.db", "journal": str(tmp_path / "journal")},
        "filters": [{"name": "pii", "kind": "pii", "direction": "both"}],
        "relay": {"keep_alive": 0.05},
        "routing": {"health": {"interval": 3600}},
    }
    async with running(2, laws={"step_seconds": 0.001}, **sections) as it:
        stage = next(stage for stage in it.gateway.pipeline.stages if isinstance(stage, LimitStage))
        stage._limits._of = lru_cache(maxsize=20)(stage._limits._make)
        sizes = []
        for begin in (0, 15, 30):
            for number in range(begin, begin + 15):
                await made_up(it, number)
            it.outcomes.clear()
            await asyncio.sleep(0.3)  # connections are given up, and records written
            sizes.append(entries_behind([it.server.app, it.gateway]))
            pages = len((await it.http.get("/metrics")).text.splitlines())
        # 15 times 9 requests more.
        assert sizes[2] - sizes[1] < 60, sizes
        assert pages < 2000


def names_of(page: str) -> set[str]:
    """Of all series that are counted here."""
    return {line.rpartition(" ")[0] for line in page.splitlines() if "sol_gateway_engine_" not in line}


async def test_metrics_have_a_bounded_number_of_labels() -> None:
    async with running() as it:
        for number in range(8):
            await made_up(it, number)
        before = (await it.http.get("/metrics")).text
        for number in range(8, 16):
            await made_up(it, number)
        after = (await it.http.get("/metrics")).text
        # What an engine says of itself comes when it has been asked for it, and has nothing of clients' in it.
        assert names_of(after) == names_of(before)
