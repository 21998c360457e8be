"""200 clients who want different things, for five minutes: does one of them hang, break the server, or change what
another is told?

    python benchmarks/server_mix.py [--quick] [--json FILE] [--model MODEL] [--clients N] [--seconds N] [--seed N]

Every request is first answered alone. Then all clients ask at once, each of them one thing after another: chats,
completions, seeded sampling, several choices, stop strings, penalties, logprobs, long prompts, conversations, JSON by a
schema and calls of tools, half of them streamed. One in eight leaves before it has its answer, one in eight sends
something wrong. The model is a tiny one with random weights (`tiny_server.py`), so that the server is asked hundreds of
times a second. The KV cache is smaller than what the clients ask for together, so that requests are preempted.

- `hung`: a request that was not answered within LIMIT seconds, and that its client had not left.
- `different_texts`: an answer, whole or streamed, greedy or sampled with a seed, that is not the one given alone. On
  Sol's CPU kernels there are no near ties: logits are bitwise the same in any company. With another backend, greedy
  answers that differ where the two likeliest tokens are within TIE of each other are counted as `ties`.
- `resident_growth`: of server and engine together, median of the last quarter against that of the second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from common import Report, arguments
from prometheus_client.parser import text_string_to_metric_families
from server_mix_jobs import (
    COMPLETIONS,
    SCHEMA,
    Answer,
    Cut,
    Job,
    Wrong,
    make_jobs,
    read_stream,
    read_whole,
    structured_jobs,
    with_stop,
    wrong_requests,
)
from tiny_server import TinyServer, tiny_server

LIMIT: Final = 120.0
TIE: Final = 1e-3
STAYS: Final = 10**9
IDLE_WITHIN: Final = 60.0
"""Seconds after the last client in which the engine has to be empty."""


@dataclass
class Tally:
    """What became of the requests of one kind."""

    asked: int = 0
    answered: int = 0
    left: int = 0
    same: int = 0
    ties: int = 0
    different: int = 0
    refused: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """hung, cut, 5xx, and what was neither answered nor refused as it should have been."""


@dataclass
class Mix:
    url: str
    seed: int
    until: float
    expected: list[tuple[Job, Answer]]
    wrong: list[Wrong]
    margins: dict[int, list[tuple[int, float]]]
    """Of greedy completions, by their place in `expected`: where each token's text begins, and how much likelier it was
    than the next best."""
    tallies: dict[str, Tally] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    """The first of what went wrong, for the reader."""

    def tally(self, kind: str) -> Tally:
        return self.tallies.setdefault(kind, Tally())

    def fail(self, kind: str, what: str, example: str) -> None:
        self.tally(kind).failures[what] += 1
        if len(self.examples) < 20:
            self.examples.append(f"{kind}, {what}: {example[:500]}")

    async def client(self, session: aiohttp.ClientSession, number: int) -> None:
        random_ = random.Random(self.seed * 1_000_003 + number)
        while time.monotonic() < self.until:
            what = random_.random()
            kind = "wrong"
            try:
                async with asyncio.timeout(LIMIT):
                    if what < 1 / 8:
                        await self.send_wrong(session, random_.choice(self.wrong))
                        continue
                    place = random_.randrange(len(self.expected))
                    job, answer = self.expected[place]
                    kind = job.kind
                    leaves = what < 2 / 8
                    await self.ask(session, job, answer, place, random_, leaves=leaves)
            except TimeoutError:
                self.fail(kind, "hung", f"no answer within {LIMIT:.0f} s")
            except (aiohttp.ClientError, ValueError, KeyError, Cut) as error:
                self.fail(kind, "cut", repr(error))

    async def send_wrong(self, session: aiohttp.ClientSession, wrong: Wrong) -> None:
        tally = self.tally("wrong")
        tally.asked += 1
        headers = {"content-type": wrong.content_type}
        async with session.request(wrong.method, self.url + wrong.path, data=wrong.data, headers=headers) as response:
            body = await response.json()
            if response.status == wrong.status and body["error"]["message"]:
                tally.refused += 1
            else:
                self.fail("wrong", f"{response.status // 100}xx", f"{wrong.name}: {response.status} {body}")

    async def ask(
        self,
        session: aiohttp.ClientSession,
        job: Job,
        expected: Answer,
        place: int,
        random_: random.Random,
        *,
        leaves: bool,
    ) -> None:
        tally = self.tally(job.kind)
        tally.asked += 1
        streams = random_.random() < 0.5
        if leaves and not streams:
            patience = random_.expovariate(20)
            try:
                await asyncio.wait_for(answer_of(session, self.url, job, streams=False), patience)
            except TimeoutError:
                tally.left += 1
                return
            tally.answered += 1
            return
        leave_after = random_.randrange(12) if leaves else STAYS
        got = await answer_of(session, self.url, job, streams=streams, leave_after=leave_after)
        if isinstance(got, str):
            self.fail(job.kind, got[:3], got)
        elif got is None:
            tally.left += 1
        else:
            tally.answered += 1
            if got == expected:
                tally.same += 1
            elif is_tie(expected, got, self.margins.get(place)):
                tally.ties += 1
            else:
                tally.different += 1
                self.fail(job.kind, "different", f"{expected} became {got}")


async def answer_of(
    session: aiohttp.ClientSession, url: str, job: Job, *, streams: bool, leave_after: int = STAYS
) -> Answer | str | None:
    """The answer; None if the client left; status and body if it was refused. Raises `Cut` and aiohttp's errors."""
    previous: dict[str, Any] = {}
    answers: Answer = ()
    for turn in range(2 if job.goes_on else 1):
        body = {**job.body, **previous}
        # The turn that is gone on from is read whole: a stream of chats and completions carries its id in every chunk.
        as_stream = streams and not (job.goes_on and turn == 0)
        if as_stream:
            body["stream"] = True
        async with session.post(url + job.path, json=body) as response:
            if response.status != 200:
                return f"{response.status} {await response.text()}"
            got = await (read_stream(response, job, leave_after) if as_stream else read_whole(response, job))
        if got is None:
            return None
        texts, answer_id = got
        answers += texts
        previous = {"previous_response_id": answer_id, "input": "Go on."}
    return answers


def is_tie(expected: Answer, got: Answer, margins: list[tuple[int, float]] | None) -> bool:
    """Whether a greedy answer may differ where it does, because two tokens were as likely as each other there."""
    if margins is None or len(expected) != 1 or len(got) != 1:
        return False
    one, other = expected[0].text, got[0].text
    differs = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    # The other token may begin with the whole text of this one: then they differ only in the text after it.
    near = [margin for offset, margin in margins if offset <= differs][-2:]
    return min(near, default=1.0) < TIE


async def margins_of(session: aiohttp.ClientSession, url: str, job: Job) -> list[tuple[int, float]] | None:
    if job.kind not in ("completion", "long"):
        return None
    async with session.post(url + COMPLETIONS, json={**job.body, "logprobs": 2}) as response:
        logprobs = (await response.json())["choices"][0]["logprobs"]
    values = [sorted(top.values(), reverse=True) for top in logprobs["top_logprobs"]]
    start = logprobs["text_offset"][0]
    return [
        (offset - start, best[0] - best[1] if len(best) > 1 else 0.0)
        for offset, best in zip(logprobs["text_offset"], values, strict=True)
    ]


def has_form(job: Job, answer: Answer) -> bool:
    """Whether it is what was asked for, unless it was cut."""
    for text in answer:
        if text.reason != "length":
            value = json.loads(text.calls[0][1] if "tools" in job.body else text.text)
            if set(value) != set(SCHEMA["required"]):
                return False
    return True


async def answer_alone(session: aiohttp.ClientSession, mix: Mix, jobs: list[Job], report: Report) -> None:
    """Fill `mix.expected`, one request at a time."""
    for job in jobs:
        answer = await answer_of(session, mix.url, job, streams=False)
        if answer is None or isinstance(answer, str):
            raise RuntimeError(f"{job.kind} was not answered: {answer}")
        if job.is_json and not has_form(job, answer):
            mix.fail(job.kind, "form", repr(answer))
        margins = await margins_of(session, mix.url, job)
        if margins is not None:
            mix.margins[len(mix.expected)] = margins
        mix.expected.append((job, answer))
        if job.kind == "completion" and (stopped := with_stop(job, answer)) is not None:
            mix.expected.append(stopped)
    report.row(phase="alone", requests=len(mix.expected), kinds=len({job.kind for job, _ in mix.expected}))


async def engine_numbers(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    samples: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            reason = sample.labels.get("finished_reason")
            samples[sample.name if reason is None else f"{sample.name} {reason}"] = sample.value
    async with session.get(f"{url}/load") as response:
        samples["server_load"] = (await response.json())["server_load"]
    return samples


LEFT: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "server_load")


async def what_is_left(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Once nobody asks for anything: requests, and the share of the KV cache that is in use."""
    deadline = time.monotonic() + IDLE_WITHIN
    while True:
        numbers = await engine_numbers(session, url)
        left = {name: numbers[name] for name in LEFT}
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.2)


async def watch_memory(served: TinyServer, until: float, every: float) -> list[int]:
    resident = []
    while time.monotonic() < until:
        resident.append(served.resident_bytes)
        await asyncio.sleep(every)
    return resident


def growth(resident: list[int]) -> float:
    quarter = max(1, len(resident) // 4)
    return statistics.median(resident[-quarter:]) / statistics.median(resident[quarter : 2 * quarter]) - 1


async def run(served: TinyServer, args: argparse.Namespace, report: Report) -> None:
    mix = Mix(served.url, args.seed, 0.0, [], wrong_requests(), {})
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        await answer_alone(session, mix, make_jobs(args.seed) + structured_jobs(args.seed), report)
        begin = time.monotonic()
        mix.until = begin + args.seconds
        watching = asyncio.create_task(watch_memory(served, mix.until, args.seconds / 60))
        await asyncio.gather(*(mix.client(session, number) for number in range(args.clients)))
        seconds = time.monotonic() - begin
        resident = await watching
        left = await what_is_left(session, served.url)
        numbers = await engine_numbers(session, served.url)
        again = 0
        for job, expected in mix.expected:
            again += await answer_of(session, served.url, job, streams=True) != expected
    tell(mix, report, args.clients, seconds)
    report.section()
    report.row(
        resident_mib=round(statistics.median(resident) / 2**20), most_mib=round(max(resident) / 2**20),
        preemptions=int(numbers["vllm:num_preemptions_total"]),
        aborted=int(numbers.get("vllm:request_success_total abort", 0)),
        tokens=int(numbers["vllm:generation_tokens_total"]), prefix_hits=int(numbers["vllm:prefix_cache_hits_total"]),
    )  # fmt: skip
    failures: Counter[str] = Counter()
    for tally in mix.tallies.values():
        failures.update(tally.failures)
    report.at_most("hung", failures["hung"], 0)
    report.at_most("answers_of_5xx", sum(failures[name] for name in failures if name.startswith("5")), 0)
    rest = sum(count for name, count in failures.items() if name not in ("hung", "different") and name[0] != "5")
    report.at_most("cut_or_wrongly_refused", rest, 0)
    report.at_most("different_texts", failures["different"] + again, 0)
    tracebacks = served.tracebacks()
    report.at_most("tracebacks_in_the_log", len(tracebacks), 0)
    for name in LEFT:
        report.at_most(f"left: {name.removeprefix('vllm:')}", left[name], 0)
    report.at_most("resident_growth", growth(resident), 0.05)
    if args.model is None and not args.quick:
        report.at_least("preemptions", numbers["vllm:num_preemptions_total"], 1)
    for example in [*mix.examples, *(traceback[:4000] for traceback in tracebacks[:5])]:
        print(example)


def tell(mix: Mix, report: Report, clients: int, seconds: float) -> None:
    report.section()
    for kind, tally in sorted(mix.tallies.items()):
        report.row(
            kind=kind, asked=tally.asked, answered=tally.answered, same=tally.same, ties=tally.ties,
            left=tally.left, refused=tally.refused,
            failures=", ".join(f"{name} {count}" for name, count in sorted(tally.failures.items())) or "none",
        )  # fmt: skip
    asked = sum(tally.asked for tally in mix.tallies.values())
    report.section()
    report.row(
        clients=clients, seed=mix.seed, seconds=round(seconds, 1), asked=asked, per_second=round(asked / seconds, 1)
    )


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", help="another to serve (default: a tiny one with random weights)")
    parser.add_argument("--clients", type=int, help="how many ask at once (default: 200; quick: 40)")
    parser.add_argument("--seconds", type=float, help="how long they ask (default: 300; quick: 20)")
    parser.add_argument("--seed", type=int, default=1, help="what clients choose is drawn from it")
    args = parser.parse_args()
    args.clients = args.clients or (40 if args.quick else 200)
    args.seconds = args.seconds or (20.0 if args.quick else 300.0)
    report = Report("server_mix", args.quick)
    # 64 places for 200 clients, so that there is always a queue, and blocks for about a third of those.
    options = ["--max-model-len", "512", "--max-num-seqs", "64"]
    options += ["--kv-cache-memory-bytes", str(2**20)] if args.model is None else []
    with tiny_server(*options, model=args.model) as served:
        asyncio.run(run(served, args, report))
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
