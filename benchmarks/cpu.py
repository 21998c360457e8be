"""The CPU path against its rivals on SmolLM2-135M: `sol.LLM` in this process, the rivals in theirs.

    python benchmarks/rivals.py            # once: compiles llama.cpp, installs vLLM, makes the files
    python benchmarks/cpu.py [--quick] [--rounds N] [--threads N] [--only WORD ...] [--json FILE]

What is compared is measured in turns within one run, since the host's speed drifts; a bar is on the median of the
ratios within a round. A rival that is not there is left out, and named under "skipped" in the table.

- one stream: tokens a second of decoding after 64 prompt tokens, and of the prefill of 512; llama-bench
- 8 and 32 streams: tokens a second of decoding together, each after 64 prompt tokens; llama-batched-bench
- the same 8 streams on vLLM in float32, the fastest it has on a processor without bfloat16 arithmetic. Sol's are those
  of the Q8_0 file (the bar) and of float32
- float32, one stream: a bare torch loop and transformers' generate on the same weights; tokens are compared, too
- a step of 6 tokens against a step of 1, as in verifying drafts, at a context of 128
- memory above bare imports after one request of 2,048 tokens, against what llama.cpp says of its own buffers, sized
  as llama-server sizes them for one stream

Sol's decoding is timed as the difference of a run of many tokens and a run of one, with the same prompts; the rivals'
tools time it by themselves and, unlike Sol, sample nothing. Sol opens every file as users do, `LLM(model=path)`; for
32 streams the step is large enough that decoding begins with all of them, as it does in llama-batched-bench.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bare_loop import BareLoop, transformers_model
from common import Report, arguments
from direct import Direct
from rivals import HERE, Files, LlamaCpp, VllmCpu, files, say

from sol import LLM, SamplingParams
from sol.config import EngineConfig
from sol.models.checkpoint import open_checkpoint
from sol.models.config import load_model_config
from sol.models.source import resolve

PROMPT = 64
PREFILL = 512
MEMORY_CONTEXT = 2048
STEP_CONTEXT = 128
VERIFIED = 6
MIB = 2**20

ONE_STREAM_BARS = {"q4_1": 1.4, "q4_0": 1.2, "q8_0": 1.15}
PREFILL_BARS = {"q4_1": 2.0, "q8_0": 1.3}
STREAMS_BARS = {8: 1.8, 32: 1.6}
VLLM_BAR = 3.5
STEP_BARS = {"q4_1": 2.2, "f32": 1.5}
MEMORY_BAR = 1.3


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    rounds: int
    tokens: int
    """Decoded in a run by one stream"""
    streams_tokens: int
    """Decoded in a run by each of many streams"""
    steps: int

    @classmethod
    def of(cls, quick: bool, rounds: int | None) -> Sizes:
        if quick:
            return cls(rounds=rounds or 2, tokens=48, streams_tokens=12, steps=12)
        return cls(rounds=rounds or 7, tokens=128, streams_tokens=64, steps=60)


def prompts(streams: int, length: int) -> list[dict[str, list[int]]]:
    """Each begins with another token; speed does not depend on which."""
    return [{"prompt_token_ids": [1000 + PROMPT * stream + i for i in range(length)]} for stream in range(streams)]


class Sol:
    """`sol.LLM` on one file."""

    def __init__(self, model: str, streams: int = 1) -> None:
        # Without the prefix cache: a prompt is computed in every run.
        options: dict[str, Any] = {"max_model_len": PREFILL + 8, "enable_prefix_caching": False}
        if streams > 1:
            step = streams * PROMPT
            options |= {"max_num_batched_tokens": max(step, PREFILL), "max_num_prefill_tokens": max(step, PREFILL)}
        self.llm = LLM(model=model, device="cpu", speculation="off", **options)
        self.tokens: list[int] = []
        """Of the first stream, last time."""

    def seconds(self, streams: int, length: int, tokens: int) -> float:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False)
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts(streams, length), params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        self.tokens = list(outputs[0].outputs[0].token_ids)
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
        return seconds

    def decode(self, streams: int, tokens: int) -> float:
        """Tokens a second of all streams."""
        first = self.seconds(streams, PROMPT, 1)
        return streams * tokens / (self.seconds(streams, PROMPT, tokens + 1) - first)

    def prefill(self) -> float:
        return PREFILL / self.seconds(1, PREFILL, 1)


class Llama:
    """llama.cpp's own benchmarks on one file."""

    def __init__(self, llama: LlamaCpp, model: str, threads: int) -> None:
        self._llama, self._model, self._threads = llama, model, threads

    def _lines(self, program: str, *options: str | int) -> list[dict[str, Any]]:
        command = [self._llama.program(program), "-m", self._model, "-t", self._threads, *options]
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
        )
        return [json.loads(line) for line in (done.stdout + "\n" + done.stderr).splitlines() if line.startswith("{")]

    def _bench(self, *options: str | int) -> float:
        (result,) = self._lines("llama-bench", "-r", 1, "-o", "jsonl", *options)
        speed: float = result["avg_ts"]
        return speed

    def decode(self, streams: int, tokens: int) -> float:
        if streams == 1:
            return self._bench("-p", 0, "-n", tokens, "-d", PROMPT)
        context = streams * (PROMPT + tokens)
        (result,) = self._lines(
            "llama-batched-bench", "-c", context, "-npp", PROMPT, "-ntg", tokens, "-npl", streams,
            "--output-format", "jsonl",
        )  # fmt: skip
        speed: float = result["speed_tg"]
        return speed

    def prefill(self) -> float:
        return self._bench("-p", PREFILL, "-n", 0)


@dataclass
class Vllm:
    """vLLM in a process that waits for its turn."""

    process: subprocess.Popen[str]

    def ask(self, **wanted: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()
        seconds: float = self.answer()["seconds"]
        return seconds

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with code {self.process.wait()}")
        result: dict[str, Any] = json.loads(line)
        return result

    def decode(self, streams: int, tokens: int) -> float:
        first = self.ask(streams=streams, prompt=PROMPT, tokens=1)
        return streams * tokens / (self.ask(streams=streams, prompt=PROMPT, tokens=tokens + 1) - first)


@contextmanager
def vllm(rival: VllmCpu, model: str, threads: int) -> Iterator[Vllm]:
    command = [str(rival.python), str(HERE / "vllm_streams.py"), model, str(PREFILL)]
    with (rival.root / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=rival.environment(threads), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            text=True, start_new_session=True, cwd=rival.root,
        )  # fmt: skip
        try:
            running = Vllm(process)
            running.answer()
            yield running
        finally:
            end_group(process)


def end_group(process: subprocess.Popen[str]) -> None:
    """vLLM's engine and its workers are processes of their own, which outlive a parent that is ended alone."""
    deadline = time.monotonic() + 20
    with contextlib.suppress(ProcessLookupError):  # the group is gone
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass
class Comparison:
    """What contenders make of one task in rounds; the order turns by one each round."""

    speeds: dict[str, list[float]] = field(default_factory=dict)

    def run(self, rounds: int, contenders: dict[str, Callable[[], float]]) -> None:
        order = list(contenders)
        for _ in range(rounds):
            for name in order:
                self.speeds.setdefault(name, []).append(contenders[name]())
            order = order[1:] + order[:1]

    def ratio(self, ours: str, rival: str) -> float:
        return statistics.median(o / r for o, r in zip(self.speeds[ours], self.speeds[rival], strict=True))

    def rows(self, report: Report, what: str, ours: str = "sol", **columns: Any) -> None:
        for name, speeds in self.speeds.items():
            against = (
                {} if name == ours or ours not in self.speeds else {"sol_over_it": round(self.ratio(ours, name), 3)}
            )
            report.row(
                what=what, engine=name, **columns, tokens_per_s=round(statistics.median(speeds), 1),
                slowest=round(min(speeds), 1), fastest=round(max(speeds), 1), **against,
            )  # fmt: skip


class Benchmark:
    def __init__(self, report: Report, sizes: Sizes, threads: int, only: Sequence[str]) -> None:
        self.report, self.sizes, self.threads, self.only = report, sizes, threads, only
        self.llama: LlamaCpp | None = LlamaCpp()
        self.vllm: VllmCpu | None = VllmCpu()
        self.files: Files = files()
        if not self.llama.is_there:
            self.llama = None
            self._skip("llama.cpp")
        else:
            report.versions["llama.cpp"] = self.llama.version
        if report.quick:
            self.vllm = None
        elif not self.vllm.is_there or not self.files.safetensors.exists():
            self.vllm = None
            self._skip("vllm")
        else:
            report.versions["vllm"] = self.vllm.version

    def _skip(self, what: str) -> None:
        say(f"{what} is not there and is skipped: python benchmarks/rivals.py prepares it")
        self.report.row(what="skipped", engine=what)

    def wanted(self, *words: str) -> bool:
        return not self.only or any(word in self.only for word in words)

    def has(self, kind: str) -> bool:
        if self.files.has(kind):
            return True
        self._skip(f"{kind} file")
        return False

    def contenders(
        self, sol: Sol, kind: str, measure: Callable[[Sol | Llama], float]
    ) -> dict[str, Callable[[], float]]:
        found: dict[str, Callable[[], float]] = {"sol": lambda: measure(sol)}
        if self.llama is not None:
            rival = Llama(self.llama, self.files.gguf(kind), self.threads)
            found["llama.cpp"] = lambda: measure(rival)
        return found

    def compare(
        self, what: str, kind: str, sol: Sol, measure: Callable[[Sol | Llama], float], bar: float, **columns: Any
    ) -> None:
        say(f"{kind}: {what}")
        contenders = self.contenders(sol, kind, measure)
        contenders["sol"]()  # warms up
        comparison = Comparison()
        comparison.run(self.sizes.rounds, contenders)
        comparison.rows(self.report, what, weights=kind, **columns)
        if "llama.cpp" in contenders:
            name = f"{kind}_{what.replace(' ', '_')}_over_llama_cpp"
            self.report.at_least(name, comparison.ratio("sol", "llama.cpp"), bar)

    def one_stream(self, kind: str) -> None:
        if not self.wanted(kind, "decode", "prefill") or not self.has(kind):
            return
        sol = Sol(self.files.gguf(kind))
        if self.wanted(kind, "decode"):
            self.compare("decode", kind, sol, lambda engine: engine.decode(1, self.sizes.tokens), ONE_STREAM_BARS[kind])
        if kind in PREFILL_BARS and self.wanted(kind, "prefill"):
            self.compare("prefill", kind, sol, lambda engine: engine.prefill(), PREFILL_BARS[kind])

    def many_streams(self, kind: str) -> None:
        if not self.wanted(kind, "streams") or not self.has(kind):
            return
        sol = Sol(self.files.gguf(kind), max(STREAMS_BARS))
        for streams, bar in STREAMS_BARS.items():
            if self.report.quick and streams > 8:
                continue

            def decode(engine: Sol | Llama, streams: int = streams) -> float:
                return engine.decode(streams, self.sizes.streams_tokens)

            self.compare(f"{streams} streams", kind, sol, decode, bar)

    def against_vllm(self) -> None:
        if self.vllm is None or not self.wanted("vllm"):
            return
        say("8 streams on vLLM, float32")
        tokens = self.sizes.streams_tokens
        with vllm(self.vllm, str(self.files.safetensors), self.threads) as rival:
            contenders: dict[str, Callable[[], float]] = {"vllm float32": lambda: rival.decode(8, tokens)}

            def rested(sol: Sol) -> float:
                # vLLM's threads go on spinning for a while, which would slow the run of one token that is taken off.
                time.sleep(2)
                sol.seconds(8, PROMPT, 1)
                return sol.decode(8, tokens)

            for kind in ("q8_0", "f32"):
                if self.has(kind):
                    sol = Sol(self.files.gguf(kind), 8)
                    contenders[f"sol {kind}"] = lambda sol=sol: rested(sol)  # type: ignore[misc]
            for measure in contenders.values():
                measure()  # warms up
            comparison = Comparison()
            comparison.run(self.sizes.rounds, contenders)
        comparison.rows(self.report, "8 streams", ours="sol q8_0")
        if "sol q8_0" in contenders:
            ratio = comparison.ratio("sol q8_0", "vllm float32")
            self.report.at_least("q8_0_8_streams_over_vllm_float32", ratio, VLLM_BAR)

    def float32(self) -> None:
        """One stream against no engine at all."""
        if not self.wanted("f32", "float32") or not self.has("f32"):
            return
        say("f32: bare torch loop" + ("" if self.report.quick else " and transformers"))
        tokens = self.sizes.tokens // 4 if self.report.quick else self.sizes.tokens // 2
        source = resolve(self.files.gguf("f32"))
        config, checkpoint = load_model_config(source), open_checkpoint(source)
        ids = prompts(1, PROMPT)[0]["prompt_token_ids"]
        generators: dict[str, Callable[[Sequence[int], int], list[int]]] = {
            "bare loop": BareLoop(config, checkpoint, PROMPT + tokens).generate
        }
        if not self.report.quick:
            generators["transformers"] = transformers_model(config, checkpoint)
        sol = Sol(self.files.gguf("f32"))
        made: dict[str, list[int]] = {}

        def timed(name: str) -> float:
            # Sol leaves torch one thread, for its kernels have their own; the others compute with torch's.
            before = torch.get_num_threads()
            torch.set_num_threads(self.threads)
            begin = time.perf_counter()
            made[name] = generators[name](ids, tokens)
            seconds = time.perf_counter() - begin
            torch.set_num_threads(before)
            return tokens / seconds

        contenders: dict[str, Callable[[], float]] = {"sol": lambda: tokens / sol.seconds(1, PROMPT, tokens)}
        for name in generators:
            contenders[name] = lambda name=name: timed(name)  # type: ignore[misc]
        for measure in contenders.values():
            measure()  # warms up
        comparison = Comparison()
        comparison.run(self.sizes.rounds, contenders)
        pairs = zip(sol.tokens, made["bare loop"], strict=True)
        same = next((i for i, (ours, bare) in enumerate(pairs) if ours != bare), tokens)
        comparison.rows(self.report, f"prompt and {tokens} tokens", weights="f32", same_tokens_as_bare=same)
        self.report.at_least("f32_over_bare_loop", comparison.ratio("sol", "bare loop"), 1.0)
        if "transformers" in generators:
            self.report.more_than("f32_over_transformers", comparison.ratio("sol", "transformers"), 1.0)

    def steps(self, kind: str) -> None:
        """A step that verifies drafts against one that decodes."""
        if not self.wanted(kind, "steps") or not self.has(kind):
            return
        say(f"{kind}: a step of {VERIFIED} tokens against 1")
        model = Direct.open(EngineConfig(model=self.files.gguf(kind), device="cpu", max_model_len=256))
        ids = list(range(1000, 1000 + STEP_CONTEXT + VERIFIED))
        model.forward(model.batch(ids[:STEP_CONTEXT], 0))
        batches = {n: model.batch(ids[STEP_CONTEXT : STEP_CONTEXT + n], STEP_CONTEXT) for n in (1, VERIFIED)}
        seconds: dict[int, list[float]] = {n: [] for n in batches}
        for _ in range(self.sizes.steps):
            for count, batch in batches.items():
                begin = time.perf_counter()
                model.forward(batch)
                seconds[count].append(time.perf_counter() - begin)
        middle = {count: statistics.median(times[2:]) for count, times in seconds.items()}
        for count, value in middle.items():
            report_speed = round(count / value, 1)
            self.report.row(what=f"step of {count}", engine="sol", weights=kind, ms=round(value * 1e3, 3),
                            tokens_per_s=report_speed)  # fmt: skip
        ratios = [six / one for one, six in zip(seconds[1][2:], seconds[VERIFIED][2:], strict=True)]
        self.report.at_most(f"{kind}_step_of_{VERIFIED}_over_1", statistics.median(ratios), STEP_BARS[kind])

    def memory(self) -> None:
        if not self.wanted("memory"):
            return
        say(f"memory of a request of {MEMORY_CONTEXT} tokens")
        model = self.files.gguf("q4_1")
        script = [sys.executable, str(HERE / "cpu_memory.py"), model, str(MEMORY_CONTEXT)]
        done = subprocess.run(script, check=True, stdout=subprocess.PIPE, text=True)
        ours: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        self.report.row(
            what="memory", engine="sol", weights="q4_1",
            **{f"{name}_mib": round(ours[of] / MIB, 1) for name, of in (
                ("all", "engine"), ("peak", "peak"), ("imports", "imports"), ("model", "weights"), ("kv", "kv_cache"),
            )},
        )  # fmt: skip
        if self.llama is None:
            return
        strict = self.llama_memory("llama.cpp", 1)
        if not self.report.quick:
            self.llama_memory("llama.cpp, logits of a batch", 0)
        self.report.at_most("q4_1_memory_over_llama_cpp", ours["engine"] / MIB / strict, MEMORY_BAR)

    def llama_memory(self, engine: str, outputs: int) -> float:
        """MiB of the buffers that llama.cpp says it has, with room for the logits of `outputs` tokens."""
        assert self.llama is not None
        arguments = [self.files.gguf("q4_1"), str(self.threads), str(MEMORY_CONTEXT), str(outputs)]
        command = [str(self.llama.program("llama_logits")), *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        parts = dict.fromkeys(("model", "KV", "output", "compute"), 0.0)
        for part, size in re.findall(r"(model|KV|output|compute) buffer size\s*=\s*([\d.]+) MiB", done.stderr):
            parts[part] += float(size)
        assert parts["model"] > 0, done.stderr
        assert parts["KV"] > 0, done.stderr
        total = sum(parts.values())
        resident = {name: int(kib) / 1024 for name, kib in re.findall(r"(Vm\w+):\s*(\d+) kB", done.stdout)}
        self.report.row(
            what="memory", engine=engine, weights="q4_1", all_mib=round(total, 1),
            **{f"{name.lower()}_mib": round(size, 1) for name, size in parts.items()},
            whole_process_mib=round(resident["VmRSS"], 1),
        )  # fmt: skip
        return total

    def run(self) -> None:
        parts: list[Callable[[], None]] = [
            *(lambda kind=kind: self.one_stream(kind) for kind in ONE_STREAM_BARS),
            lambda: self.many_streams("q8_0"),
            self.against_vllm,
            self.float32,
            *(lambda kind=kind: self.steps(kind) for kind in STEP_BARS),
            self.memory,
        ]
        for part in parts:
            before, begin = len(self.report.rows), time.perf_counter()
            part()
            if len(self.report.rows) > before:
                gc.collect()  # an engine's memory and threads, before the next one is loaded
                say(f"  {time.perf_counter() - begin:.1f} s")


def idle_share(seconds: float = 1.0) -> float:
    """Of all cores, now."""

    def ticks() -> tuple[int, int]:
        fields = [int(value) for value in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
        return fields[3] + fields[4], sum(fields)

    idle, total = ticks()
    time.sleep(seconds)
    later_idle, later_total = ticks()
    return (later_idle - idle) / max(1, later_total - total)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison (default: 7; 2 with --quick)")
    parser.add_argument("--threads", type=int, help="of the rivals (default: one for each core, as Sol takes)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD",
        help="parts to run: a format (q4_1, q4_0, q8_0, f32), decode, prefill, streams, vllm, float32, steps, memory",
    )  # fmt: skip
    args = parser.parse_args()
    report = Report("cpu", args.quick)
    threads = args.threads or len(os.sched_getaffinity(0))
    idle = idle_share()
    report.row(what="machine before", idle=round(idle, 2))
    if idle < 0.9:
        # llama.cpp's threads spin at every barrier: beside one busy process it is up to ten times slower.
        say(f"WARNING: the machine is only {idle:.0%} idle: these figures are not to be relied on")
    Benchmark(report, Sizes.of(args.quick, args.rounds), threads, args.only).run()
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
