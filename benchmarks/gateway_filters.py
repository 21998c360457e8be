"""What the gateway's filters cost: processor time for each request and each streamed chunk, and for hostile texts.

    python benchmarks/gateway_filters.py [--quick] [--json FILE]

All kinds of rules are on but those that need a model: sizes, 1,000 phrases, two expressions, all built-in forms of
personal data, the signs of prompt injection. Times are of the process, so neighbours on the machine count little, and
each is the least of several rounds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import msgspec
from common import Report, arguments

from sol.gateway.call import Call
from sol.gateway.filters.config import InjectionRule, PiiRule, RegexRule, SizeRule, WordsRule
from sol.gateway.filters.filters import Filters

RULES = (
    SizeRule(kind="size", name="size", max_bytes=10**6, max_messages=100, max_input_tokens=10**5),
    WordsRule(
        kind="words",
        name="words",
        words=(*(f"secret project {number}" for number in range(1000)), "机密项目"),
        direction="both",
        action="redact",
    ),
    RegexRule(
        kind="regex", name="regex", patterns=(r"\bproject-[0-9]{4}\b", r"\binternal use only\b"), direction="both"
    ),
    PiiRule(kind="pii", name="pii", direction="both"),
    InjectionRule(kind="injection", name="injection"),
)  # fmt: skip
ENGLISH = "The quick brown fox jumps over 12 lazy dogs, and then asks for 3 more. "
CHINESE = "敏捷的棕色狐狸，跳过了12只懒狗。"
HOSTILE = {
    "one digit, one space": "4 ",
    "digits in groups": "12 3 45 6 7890 ",
    "a listed phrase": "secret project 5 ",
    "addresses": "a.b@example.com ",
    "half a sign": "ignore all the previous ",
    "one long key": "a",
}


def make_call(text: str, *, stream: bool = False) -> Call:
    body = {"model": "m", "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": text}]}
    return Call(
        id="x", path="/v1/chat/completions", method="POST", headers={}, body=msgspec.json.encode(body), json=body,
        model="m", stream=stream, arrived=time.monotonic(),
    )  # fmt: skip


def microseconds(work: Callable[[], object], times: int, rounds: int) -> float:
    """Of the process, for one call of `work`."""
    work()
    least = float("inf")
    for _ in range(rounds):
        begin = time.process_time()
        for _ in range(times):
            work()
        least = min(least, time.process_time() - begin)
    return 1e6 * least / times


def chunks(text: str, length: int) -> list[bytes]:
    return [
        b'data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
        b'{"content":%b},"logprobs":null,"finish_reason":null}]}\n\n' % msgspec.json.encode(text[at : at + length])
        for at in range(0, len(text), length)
    ]


def measure(report: Report) -> None:
    times, rounds = (300, 3) if report.quick else (2000, 7)
    filters = Filters(RULES)
    runner = asyncio.new_event_loop()
    for name, text in (("English", (ENGLISH * 20)[:870]), ("Chinese", (CHINESE * 40)[:330])):
        call = make_call(text)

        async def check(call: Call = call) -> None:
            for _ in range(times):
                await filters.check(call)

        spent = microseconds(lambda check=check: runner.run_until_complete(check()), 1, rounds) / times
        report.row(what=f"request, {name}", bytes=len(call.body), microseconds=spent)
        report.at_most(f"microseconds of a 1 KB request, {name}", spent, 100)
    for name, text, length in (("English", ENGLISH * 10, 5), ("Chinese", CHINESE * 20, 2)):
        output = filters.output(make_call("hi", stream=True))
        assert output is not None
        events = chunks(text, length)

        def stream(output: object = output, events: list[bytes] = events) -> None:
            for event in events:
                output.feed(event)  # type: ignore[attr-defined]

        spent = microseconds(stream, max(1, times // len(events)), rounds) / len(events)
        report.row(what=f"chunk, {name}", bytes=len(events[0]), microseconds=spent)
        report.at_most(f"microseconds of a chunk, {name}", spent, 15)
    for name, text in HOSTILE.items():
        text = (text * 100_000)[:100_000]
        spent = microseconds(lambda text=text: filters.explain(text), 1, 1 if report.quick else 3)
        report.row(what=f"hostile: {name}", bytes=len(text), microseconds=spent)
    runner.close()
    filters.close()


def main() -> int:
    options = arguments(__doc__ or "").parse_args()
    report = Report("gateway_filters", options.quick)
    measure(report)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
