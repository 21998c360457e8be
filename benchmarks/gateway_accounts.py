"""Are limits kept to the token, and is what is recorded what the engines did?"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from common import Report
from gateway_servers import gateway, staying_on
from measure_servers import MODEL, Cores, Served, simulated

WINDOW = 60.0
LIMIT = 60_000
CLIENTS = 200
KEY = "sk-benchmark"
PROMPT = list(range(100, 120))
"""Token ids: what the prompt comes to is known before."""


@dataclass(slots=True)
class Asked:
    """One request as its client knows it. Times are of `time.monotonic()`, which the simulated engine's are, too."""

    sent: float
    declared: int
    answered: float = float("inf")
    status: int = 0
    actual: int = 0


def measure_limits(report: Report, directory: Path, cores: Cores) -> None:
    seconds = 5.0 if report.quick else 150.0
    limits = {"default_tenant": {"tokens_per_minute": LIMIT}}
    with simulated("--profile", "fast", "--output-tokens-mean", "12", core=cores.measuring) as engine:
        with gateway(directory, {"a": engine}, cores.serving, limits=limits) as front, staying_on(cores.measuring):
            asked = asyncio.run(_two_hundred(front, seconds))
        records = engine.records(10_000)
    admitted = [item for item in asked if item.status == 200]
    refused = [item for item in asked if item.status == 429]
    false = [item for item in refused if _must_have_fit(item, admitted)]
    most = _most_in_a_window([(r["arrival_time"], r["prompt_tokens"] + r["completion_tokens"]) for r in records])
    report.row(
        clients=CLIENTS, seconds=seconds, answered=len(admitted), refused=len(refused), false_refusals=len(false),
        others=len(asked) - len(admitted) - len(refused), limit=LIMIT, most_in_a_minute=most,
        tokens=sum(item.actual for item in admitted),
    )  # fmt: skip
    report.at_most("tokens in the fullest minute, of the limit", most / LIMIT, 1.01)
    report.at_least("tokens in the fullest minute, of the limit (used up)", most / LIMIT, 0.95)
    report.at_most("false 429", len(false), 0)
    report.at_most("neither answered nor refused", len(asked) - len(admitted) - len(refused), 0)


async def _two_hundred(front: Served, seconds: float) -> list[Asked]:
    asked: list[Asked] = []
    end = time.monotonic() + seconds

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < end:
            declared = draw.randint(5, 40)
            item = Asked(time.monotonic(), len(PROMPT) + declared)
            asked.append(item)
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": declared, "seed": draw.getrandbits(30)}
            async with session.post(front.url + "/v1/completions", json=body) as response:
                answer = await response.json()
                item.answered, item.status = time.monotonic(), response.status
                if response.status == 200:
                    item.actual = answer["usage"]["total_tokens"]
                elif response.status == 429:
                    wait = float(response.headers["retry-after-ms"]) / 1000
                    await asyncio.sleep(min(wait, max(0.0, end - time.monotonic())))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session, number) for number in range(CLIENTS)))
    return asked


def _must_have_fit(refused: Asked, admitted: Sequence[Asked]) -> bool:
    """Whether it was refused although it fits beside all that can have been taken at any moment while it was open."""
    slack = 0.1
    taken = sum(
        item.declared if item.answered > refused.sent - slack else item.actual
        for item in admitted
        if item.sent <= refused.answered and item.answered >= refused.sent - WINDOW - slack
    )
    return taken + refused.declared <= LIMIT


def _most_in_a_window(taken: Sequence[tuple[float, int]]) -> int:
    """A tenth of a second less than a minute: from the reservation to the engine, one request takes longer than
    another."""
    ordered = sorted(taken)
    most = total = first = 0
    for at, tokens in ordered:
        total += tokens
        while ordered[first][0] <= at - (WINDOW - 0.1):
            total -= ordered[first][1]
            first += 1
        most = max(most, total)
    return most


def measure_ledger(report: Report, directory: Path, cores: Cores) -> None:
    """Steps of an engine are long here, so that it hears of a client's leaving before its next token: what it generated
    and what it had said are then the same, to the token."""
    turns = 4 if report.quick else 40
    sections = {
        "limits": {"default_tenant": {"tokens_per_minute": 10**12}},
        "database": {"url": f"sqlite:///{directory}/sol.db", "journal": str(directory / "journal")},
        "routing": {"health": {"interval": 0.2}},
        "keys": [{"key": KEY, "tenant": "acme"}],
    }
    flags = ("--profile", "fast", "--step-seconds", "0.05")
    with (
        simulated(*flags, core=cores.measuring) as one,
        simulated(*flags, core=cores.measuring) as other,
        contextlib.ExitStack() as stack,
    ):
        engines = {"a": one, "b": other}
        front = stack.enter_context(gateway(directory, engines, cores.serving, **sections))
        with staying_on(cores.measuring):
            ended = asyncio.run(_troubled(front, engines, turns))
        records: dict[tuple[str, str], dict[str, Any]] = {}
        for name, engine in engines.items():
            records |= {(name, record["x_request_id"]): record for record in engine.records(10_000)}
        stack.close()  # the gateway ends in order, and what it has recorded is written
        with contextlib.closing(sqlite3.connect(directory / "sol.db")) as database:
            names = "request_id, engine, prompt_tokens, completion_tokens, ended, estimated"
            rows = database.execute(f"SELECT {names} FROM sol_usage").fetchall()
    _judge_ledger(report, rows, records, ended)


def _judge_ledger(
    report: Report, rows: Sequence[tuple[Any, ...]], records: Mapping[tuple[str, str], Any], ended: Mapping[str, str]
) -> None:
    off: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for request_id, engine, prompt, completion, how, _ in rows:
        record = records.get((engine, request_id))
        number[how] += 1
        if record is None:
            off[how] += prompt + completion
            continue
        # What an engine had generated of an answer that broke on its way is not what the gateway had of it.
        off[how] += abs(prompt - record["prompt_tokens"]) + abs(completion - record["completion_tokens"])
    finished = {key for key, record in records.items() if record["ended"] == "finished" and not record["faults"]}
    paid = Counter((engine, request_id) for request_id, engine, *_ in rows)
    for how in sorted(number):
        report.row(ended=how, requests=number[how], tokens_off=off[how])
    report.row(ended="as clients saw it", **Counter(ended.values()))
    for how in ("complete", "client_left", "failed"):
        report.at_least(f"requests recorded, {how}", number[how], 10)
    report.at_most("tokens off, complete answers", off["complete"], 0)
    report.at_most("tokens off, clients that left", off["client_left"], 0)
    report.at_most("tokens off, answers that broke, of each", off["failed"] / max(1, number["failed"]), 1)
    report.at_most("recorded twice", sum(count > 1 for count in paid.values()), 0)
    report.at_most("finished and not recorded", len(finished - set(paid)), 0)
    report.at_most("answers of 500", Counter(ended.values())["500"], 0)


async def _troubled(front: Served, engines: Mapping[str, Served], turns: int) -> dict[str, str]:
    """How each request ended for its client. Every request has an id of its own, retries too."""
    ended: dict[str, str] = {}

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        draw = random.Random(number)
        for turn in range(turns):
            stream = draw.random() < 0.7
            leave_after = draw.randint(1, 15) if stream and draw.random() < 0.3 else None
            body = {
                "model": MODEL,
                "prompt": PROMPT,
                "max_tokens": draw.randint(2, 16),
                "ignore_eos": True,
                "stream": stream,
            }
            for attempt in range(4):
                name = f"{number}-{turn}-{attempt}"
                ended[name] = await _ask(session, front.url, body, name, attempt, leave_after)
                if ended[name] in ("complete", "left"):
                    break
                await asyncio.sleep(0.1)

    async def trouble(session: aiohttp.ClientSession) -> None:
        draw = random.Random(0)
        while True:
            # Never both at once, so that there is somebody to answer.
            for engine in engines.values():
                faults = [
                    {"kind": "error", "status": 503, "share": 0.2, "end": 1.0},
                    {"kind": "reset", "after_events": draw.randint(0, 6), "share": 0.2, "end": 1.0},
                    {"kind": "truncate", "after_events": draw.randint(1, 6), "share": 0.2, "end": 1.0},
                ]
                await session.post(engine.url + "/simulate/faults", json=faults)
                await asyncio.sleep(1.2)
                async with session.post(engine.url + "/simulate/faults", json={"kind": "crash", "seconds": 0.3}):
                    await asyncio.sleep(0.6)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        troubling = asyncio.create_task(trouble(session))
        await asyncio.gather(*(client(session, number) for number in range(60)))
        troubling.cancel()
        await asyncio.gather(troubling, return_exceptions=True)
    await asyncio.sleep(2)  # engines are up again, and the last who left are forgotten
    return ended


async def _ask(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], name: str, attempt: int, leave_after: int | None
) -> str:
    headers = {"x-request-id": name, "x-stainless-retry-count": str(attempt), "authorization": f"Bearer {KEY}"}
    with contextlib.suppress(aiohttp.ClientError):
        async with session.post(url + "/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                await response.read()
                return str(response.status)
            received = b""
            async for data in response.content.iter_any():
                received += data
                if leave_after is not None and received.count(b"\n\n") >= leave_after and b"[DONE]" not in received:
                    response.close()
                    return "left"
            if not body["stream"] or received.endswith(b"data: [DONE]\n\n"):
                return "complete"
            return "told that it broke" if b'data: {"error"' in received else "ended in silence"
    return "closed without an answer"
