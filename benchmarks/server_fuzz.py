"""200,000 inputs that nobody should send: does any of them crash, hang, or become a 500?

    python benchmarks/server_fuzz.py [--quick] [--json FILE] [--scale N] [--seed N] [--only TARGET ...]

In processes of their own, guided by what code an input reaches (atheris, which is libFuzzer for Python; `pip install
atheris`; without it inputs are changed at random, and the table says so):

- `templates`: chat templates and messages, in the sandbox
- `tool_calls`: what a model writes, through the parsers of tool calls and reasoning, whole and in pieces
- `gguf`: files, through the reader of headers, the configuration and the tokenizer
- `grammars`: JSON Schemas, regular expressions and grammars, compiled and gone some steps into
- `bodies`: bodies of requests, through everything that checks them
- `streams`: server-sent events, as the gateway and `sol bench` read them

Against a server (`tiny_server.py`):

- `http`: bodies of all POST routes whose bytes were changed, with headers that make little sense
- `schemathesis`: what schemathesis makes of the server's OpenAPI document, right and wrong

An input has LIMIT seconds. One that fails is printed and kept; it belongs into tests/server/test_fuzz_targets.py.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import aiohttp
from common import ROOT, Report, arguments
from fuzz_child import LIMIT, guidance
from fuzz_seeds import BODIES, GRAMMARS, WORDS
from fuzz_targets import mutate
from server_mix import what_is_left
from tiny_server import NAME, TinyServer, tiny_server

CHILD: Final = Path(__file__).with_name("fuzz_child.py")
INPUTS: Final[dict[str, int]] = {
    "templates": 30_000,
    "tool_calls": 40_000,
    "gguf": 40_000,
    "grammars": 20_000,
    "bodies": 40_000,
    "streams": 25_000,
    "http": 20_000,
    "schemathesis": 4_000,
}
"""For the whole run; a quick one takes a fiftieth."""
ROUTES: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
CLIENTS: Final = 16


def fuzz_target(name: str, inputs: int, seed: int, report: Report) -> tuple[int, int]:
    """In a process of its own. Returns how many inputs there were, and how many failed: 0 or 1."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, str(CHILD), name, str(inputs), str(seed), directory]
        # Twice a second an input is more than any target needs.
        limit = LIMIT + 60 + inputs / 2
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=limit, check=False)
        log = done.stderr.decode(errors="replace")
        found = re.search(r"stat::number_of_executed_units:\s*(\d+)", log)
        failed = done.returncode != 0
        if failed:
            print(f"{name}: exit code {done.returncode}\n{done.stdout.decode(errors='replace')[-2000:]}{log[-6000:]}")
            for path in Path(directory).glob("failed-*"):
                print(f"{name}, {path.name}: base64 {base64.b64encode(path.read_bytes()).decode()}")
    seconds = time.perf_counter() - begin
    executed = int(found[1]) if found else 0
    report.row(
        target=name, inputs=executed, seconds=round(seconds, 1), per_second=round(executed / seconds),
        guided="by coverage" if guidance() else "no", seed=seed, failed=int(failed),
    )  # fmt: skip
    return executed, int(failed)


def http_seeds() -> list[tuple[str, bytes]]:
    """Routes, and bodies that they take."""
    model = b'"model":"%s"' % NAME.encode()
    seeds = [(ROUTES[int(body[:1])], body[1:].replace(b'"model":"m"', model)) for body in BODIES]
    fields = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_grammar")
    for grammar in GRAMMARS:
        kind, text = int(grammar[:1]), grammar[1:].decode()
        value = json.loads(text) if kind in (0, 2) else text
        seeds.append((ROUTES[1], json.dumps({"prompt": "x", "max_tokens": 9, fields[kind]: value}).encode()))
    return seeds


async def fuzz_http(served: TinyServer, inputs: int, seed: int) -> list[str]:
    """Returns what failed."""
    random_ = random.Random(seed)
    words = WORDS["bodies"] + WORDS["grammars"]
    seeds = http_seeds()
    bodies = [body for _, body in seeds]
    failures: list[str] = []
    coming = iter(range(inputs))

    async def client(session: aiohttp.ClientSession) -> None:
        for _ in coming:
            path, body = random_.choice(seeds)
            data = mutate(random_, body, words, bodies)
            if random_.random() < 0.1:
                path = random_.choice(ROUTES)
            headers = strange_headers(random_)
            try:
                async with (
                    asyncio.timeout(LIMIT),
                    session.post(served.url + path, data=data, headers=headers) as response,
                ):
                    text = await response.text()
                    if response.status >= 500 and '"deadline_exceeded"' not in text:
                        failures.append(f"{response.status} {text[:300]}: {path} {headers} {data!r}")
                    elif response.status >= 400 and not json.loads(text)["error"]["message"]:
                        failures.append(f"no message: {path} {headers} {data!r}")
            except (TimeoutError, aiohttp.ClientError, ValueError, KeyError) as error:
                failures.append(f"{error!r}: {path} {headers} {data!r}")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
    return failures


def strange_headers(random_: random.Random) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    values = ("", "0", "-1", "1", "50", "nan", "1e308", "x" * 300, "Bearer x", "text/plain", "application/json; x")
    names = ("x-request-id", "x-request-deadline-ms", "x-stainless-read-timeout", "x-sol-usage-key", "content-type")
    for name in names:
        if random_.random() < 0.05:
            headers[name] = random_.choice(values)
    return headers


def fuzz_schema(served: TinyServer, inputs: int, seed: int) -> tuple[int, list[str]]:
    """Returns how many requests there were, and what failed."""
    import hypothesis
    import schemathesis

    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    # The routes that take bodies get most of them.
    weights = [8 if operation.method.lower() == "post" else 1 for operation in operations]
    failures: list[str] = []
    asked = 0
    for operation, weight in zip(operations, weights, strict=True):

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=max(1, inputs * weight // sum(weights)),
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            nonlocal asked
            asked += 1
            response = case.call(base_url=served.url, timeout=LIMIT)
            if response.status_code >= 500 and "deadline_exceeded" not in response.text:
                raise RuntimeError(f"{response.status_code} {response.text[:300]}: {case.as_curl_command()[:2000]}")

        try:
            ask()
        except Exception as error:
            failures.append(f"{operation.method} {operation.path}: {error!r}")
    return asked, failures


def fuzz_server(args: argparse.Namespace, wanted: list[str], report: Report) -> tuple[int, int]:
    total = failed = 0
    with tiny_server("--max-model-len", "64", "--max-num-seqs", "64", "--scheduling-policy", "priority") as served:
        for name in wanted:
            begin, inputs = time.perf_counter(), INPUTS[name] // args.scale
            if name == "http":
                failures, asked = asyncio.run(fuzz_http(served, inputs, args.seed)), inputs
            else:
                asked, failures = fuzz_schema(served, inputs, args.seed)
            seconds = time.perf_counter() - begin
            report.row(
                target=name, inputs=asked, seconds=round(seconds, 1), per_second=round(asked / seconds),
                guided="by the document" if name == "schemathesis" else "no", seed=args.seed, failed=len(failures),
            )  # fmt: skip
            for failure in failures[:10]:
                print(f"{name}: {failure}")
            total, failed = total + asked, failed + len(failures)
        left = asyncio.run(_left(served))
        report.at_most("left_in_the_engine", left, 0)
        tracebacks = served.tracebacks()
        report.at_most("tracebacks_in_the_log", len(tracebacks), 0)
        for traceback in tracebacks[:5]:
            print(traceback[:4000])
    return total, failed


async def _left(served: TinyServer) -> float:
    """Requests and the share of the KV cache in use, once nobody asks."""
    async with aiohttp.ClientSession() as session:
        return sum((await what_is_left(session, served.url)).values())


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--scale", type=int, help="divide the numbers of inputs by this (default: 1; quick: 50)")
    parser.add_argument("--seed", type=int, default=1, help="inputs are drawn from it (default: 1)")
    parser.add_argument("--only", nargs="+", choices=list(INPUTS), metavar="TARGET", help="leave out the others")
    args = parser.parse_args()
    args.scale = args.scale or (50 if args.quick else 1)
    report = Report("server_fuzz", args.quick)
    wanted = args.only or list(INPUTS)
    total = failed = 0
    for name in wanted:
        if name not in ("http", "schemathesis"):
            counted = fuzz_target(name, INPUTS[name] // args.scale, args.seed, report)
            total, failed = total + counted[0], failed + counted[1]
    if {"http", "schemathesis"} & set(wanted):
        counted = fuzz_server(args, [name for name in wanted if name in ("http", "schemathesis")], report)
        total, failed = total + counted[0], failed + counted[1]
    expected = sum(INPUTS[name] for name in wanted) // args.scale
    report.at_least("inputs", total, 0.95 * expected if args.only or args.scale > 1 else 200_000)
    report.at_most("inputs_that_failed", failed, 0)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
