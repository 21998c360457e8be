"""64 concurrent streams against a running server: do all finish, is every text right, does memory stay flat?

Every prompt is first answered alone, greedily. Then rounds of 64 streams at once, each text compared with the one
made alone. Batched arithmetic adds in another order, so where the two likeliest tokens are within TIE of each other
(in log probability) the other one may be chosen: such a text is counted as a tie, any other difference as wrong.

Resident memory is that of server and engine together. The KV cache is given a size that the first rounds fill: it is
planned memory that is committed as it is used, and what must not grow is everything else.

Last, a second server is started beside the first, and both answer.

    python benchmarks/serve.py [--quick] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import IO, Any

import httpx
import psutil
from common import ROOT, Report, arguments, ask, chat, free_port, server, wait_until_ready

from sol.config import DEFAULT_MODEL

STREAMS = 64
TIE = 1e-3
KV_CACHE_BYTES = 384 * 2**20
"""About 8,700 tokens: what 64 streams need, and half as much again."""

SUBJECTS = (
    "a river in spring", "the first computer", "bread", "a lighthouse keeper", "the moon", "a quiet library",
    "learning to swim", "an old bicycle", "the number seven", "a train at night", "honey bees", "winter",
    "a lost letter", "the desert", "a violin", "mountain weather",
)  # fmt: skip
FORMS = ("Tell me about {}.", "Write the beginning of a story about {}:", "Facts about {}:\n1.", "A poem about {}\n\n")


@dataclass(frozen=True, slots=True)
class Alone:
    """What a prompt gives when nothing else is computed."""

    prompt: str
    text: str
    offsets: list[int]
    """Where each token's text begins."""
    margins: list[float]
    """By how much each token was likelier than the next one."""

    def compare(self, text: str) -> str:
        """ "same", "tie" or "wrong"."""
        if text == self.text:
            return "same"
        differs = next((i for i, (a, b) in enumerate(zip(self.text, text, strict=False)) if a != b), None)
        if differs is None:
            differs = min(len(self.text), len(text))
        # The other token may begin with the whole text of this one: then they differ only in the text after it.
        near = [m for offset, m in zip(self.offsets, self.margins, strict=True) if offset <= differs][-2:]
        return "tie" if near and min(near) < TIE else "wrong"


def completion(prompt: str, tokens: int) -> dict[str, Any]:
    return {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def answer_alone(port: int, prompt: str, tokens: int) -> Alone:
    choice = ask(port, "/v1/completions", {**completion(prompt, tokens), "logprobs": 2})["choices"][0]
    logprobs = choice["logprobs"]
    start = logprobs["text_offset"][0]
    margins = []
    for top in logprobs["top_logprobs"]:
        best = sorted(top.values(), reverse=True)
        margins.append(best[0] - best[1] if len(best) > 1 else 0.0)
    return Alone(prompt, choice["text"], [offset - start for offset in logprobs["text_offset"]], margins)


async def stream(client: httpx.AsyncClient, prompt: str, tokens: int) -> tuple[str, str | None]:
    """The text and the finish reason of one stream; None if it did not end as it should."""
    text, reason, done = "", None, False
    body = {**completion(prompt, tokens), "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                for choice in json.loads(line[6:]).get("choices", []):
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
    return text, reason if done else None


async def run_round(port: int, prompts: list[str], tokens: int) -> list[tuple[str, str | None]]:
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=600) as client:
        return await asyncio.gather(*(stream(client, prompt, tokens) for prompt in prompts))


def resident_bytes(process: psutil.Process) -> int:
    """Of a server and its engine."""
    return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def start(port: int, log: IO[bytes]) -> Any:
    options = ["--port", str(port), "--max-model-len", "2048", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
    command = [sys.executable, "-m", "sol", "serve", DEFAULT_MODEL, *options]
    return server(command, log, cwd=ROOT, env=dict(os.environ))


def main() -> int:
    parser = arguments(__doc__ or "")
    args = parser.parse_args()
    tokens, rounds, different = (12, 3, 8) if args.quick else (64, 10, STREAMS)
    settled = 1 if args.quick else 3  # the round from which memory has to be flat

    report = Report("serve", args.quick)
    prompts = [form.format(subject) for form in FORMS for subject in SUBJECTS][:different]
    port, second_port = free_port(), free_port()
    counts = {"finished": 0, "same": 0, "tie": 0, "wrong": 0}
    resident = []
    with (
        tempfile.NamedTemporaryFile(suffix=".log") as log,
        tempfile.NamedTemporaryFile(suffix=".log") as second_log,
        start(port, log) as process,
    ):
        wait_until_ready(process, port, log, 300)
        tree = psutil.Process(process.pid)
        alone = [answer_alone(port, prompt, tokens) for prompt in prompts]
        expected = [alone[i % different] for i in range(STREAMS)]
        for number in range(1, rounds + 1):
            begin, server_cpu = time.perf_counter(), cpu_seconds(tree)
            answers = asyncio.run(run_round(port, [a.prompt for a in expected], tokens))
            seconds = time.perf_counter() - begin
            verdicts = [a.compare(text) for a, (text, _) in zip(expected, answers, strict=True)]
            finished = sum(reason == "length" for _, reason in answers)
            counts["finished"] += finished
            for verdict in verdicts:
                counts[verdict] += 1
            resident.append(resident_bytes(tree))
            report.row(
                round=number, streams=STREAMS, tokens=tokens, finished=finished, same=verdicts.count("same"),
                tie=verdicts.count("tie"), wrong=verdicts.count("wrong"), seconds=round(seconds, 2),
                tokens_per_s=round(STREAMS * tokens / seconds, 1),
                server_cpu_s=round(cpu_seconds(tree) - server_cpu, 2), resident_mib=round(resident[-1] / 2**20, 1),
            )  # fmt: skip
        with start(second_port, second_log) as second:
            wait_until_ready(second, second_port, second_log, 300)
            answered = sum(bool(chat(p, DEFAULT_MODEL)) for p in (port, second_port))

    flat = resident[settled - 1 :]
    report.at_least("finished_share", counts["finished"] / (rounds * STREAMS), 1.0)
    report.at_most("wrong_texts", counts["wrong"], 0)
    report.at_most(f"resident_growth_from_round_{settled}", max(flat) / flat[0] - 1, 0.05)
    report.at_least("servers_side_by_side", answered, 2)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
