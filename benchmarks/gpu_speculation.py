"""Speculation on a GPU: the same requests with and without, in one process, in turn.

    python benchmarks/gpu_speculation.py --json benchmarks/results/h200-speculation.json

Random weights in the shape of Llama-3-8B, as in engine_matrix.py, so there is no text to copy. Two drafters stand for
the two ends: one that knows the answers, is right with a probability and promises one (`oracle 0.9 0.9`; `oracle 0 0.9`
is a liar), and the real suffix drafter on sampled tokens among which nothing repeats (`suffix`): what it costs to look
and find nothing. Ratios are of tokens a second while all streams decode. Tokens are compared one by one: steps of at
most 16 tokens compute what decoding does, bit by bit; larger ones may round near ties the other way, which is counted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sol import SamplingParams, __version__
from sol.assemble import build_core
from sol.config import EngineConfig
from sol.engine.core import EngineCore
from sol.engine.types import EngineRequest
from sol.runner.drafters import Drafters
from sol.speculation.propose import Proposal, ProposalRow

MODEL = str(Path(__file__).with_name("llama-3-8b"))
PROMPT = 128


class Oracle:
    """A drafter that knows what a request will say; each of its tokens is right with a probability. `promised` is the
    one it says."""

    name = "suffix"

    def __init__(self, answers: Mapping[str, list[int]], right: float, promised: float, vocab_size: int) -> None:
        self._answers, self._right, self._promised, self._vocab_size = answers, right, promised, vocab_size
        self._random = random.Random(0)

    def propose(self, rows: Sequence[ProposalRow]) -> list[Proposal]:
        return [self._one(row) for row in rows]

    def forget(self, request_ids: Sequence[str], *, finished: bool) -> None:
        """It knows everything again next time."""

    def _one(self, row: ProposalRow) -> Proposal:
        said, known = row.sampling.output_token_ids, self._answers[row.request_id]
        if list(said) != known[: len(said)]:  # a near tie went the other way
            return Proposal(token_ids=[])
        answer = known[len(said) : len(said) + row.max_tokens]
        token_ids = [
            token if self._random.random() < self._right else self._random.randrange(self._vocab_size)
            for token in answer
        ]
        return Proposal(token_ids=token_ids, scores=[self._promised] * len(token_ids))


def run(core: EngineCore, streams: int, tokens: int, temperature: float) -> tuple[float, dict[str, list[int]]]:
    """Tokens a second from the moment at which every stream has its first, and what each says."""
    rng = random.Random(streams)
    requests = [
        EngineRequest(
            request_id=f"r{index}",
            prompt_token_ids=[rng.randrange(1000, 100_000) for _ in range(PROMPT)],
            params=SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True),
            seed=index,
        )
        for index in range(streams)
    ]
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    core.add(requests)
    started, count = None, 0
    while core.has_work:
        for output in core.step().outputs:
            found[output.request_id] += output.new_token_ids
            count += len(output.new_token_ids) if started is not None else 0
            if output.error is not None:
                raise RuntimeError(output.error)
        if started is None and all(found.values()):
            started = time.perf_counter()
    assert started is not None
    return count / (time.perf_counter() - started), found


def compare(plain: EngineCore, core: EngineCore, drafter: str, streams: int, tokens: int, pairs: int) -> dict[str, Any]:
    temperature = 1.0
    _, answers = run(plain, streams, tokens, temperature)
    runner: Any = core._runner
    kept = runner._drafters
    if drafter.startswith("oracle"):
        vocab_size = core.info.vocab_size
        right, promised = map(float, drafter.split()[1:])
        runner._drafters = Drafters([Oracle(answers, right, promised, vocab_size)], vocab_size=vocab_size)
    run(core, streams, tokens, temperature)
    ratios, rates, differing = [], [], 0
    for _ in range(pairs):
        before, wanted = run(plain, streams, tokens, temperature)
        after, found = run(core, streams, tokens, temperature)
        ratios.append(after / before)
        rates.append(before)
        differing += sum(found[name] != wanted[name] for name in wanted)
    runner._drafters = kept
    return {
        "drafter": drafter,
        "streams": streams,
        "plain_tok_s": round(statistics.median(rates), 1),
        "ratio": round(statistics.median(ratios), 4),
        "lowest": round(min(ratios), 4),
        "streams_that_differ": differing,
        "pairs": pairs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--drafters", nargs="+", default=["suffix", "oracle 0.9 0.9", "oracle 0.6 0.6", "oracle 0 0.9"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    common: dict[str, Any] = {
        "model": args.model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": args.device,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 12 << 30 if torch.cuda.is_available() else 64 << 20,
        "enable_prefix_caching": False,
    }
    began = time.perf_counter()
    plain = build_core(EngineConfig(**common, speculation="off"), progress=False)
    print(f"plain engine after {time.perf_counter() - began:.0f} s", flush=True)
    began = time.perf_counter()
    core = build_core(EngineConfig(**common), progress=False)
    print(f"speculating engine after {time.perf_counter() - began:.0f} s", flush=True)
    rows = []
    for drafter in args.drafters:
        for streams in args.streams:
            rows.append(compare(plain, core, drafter, streams, args.tokens, args.pairs))
            print(rows[-1], flush=True)
    result = {
        "benchmark": "gpu_speculation",
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"sol": __version__, "torch": torch.__version__},
        "model": "Llama-3-8B's shape, bfloat16, random weights",
        "rows": rows,
    }
    print(json.dumps(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
