"""Speculation on a GPU: the same requests with and without, in one process, in turn.

    python benchmarks/gpu_speculation.py --json benchmarks/results/h200-speculation.json

Random weights in the shape of Llama-3-8B, as in engine_matrix.py, so there is no text to copy. Two drafters stand for
the two ends: one that knows the answers, is right with a probability and promises one (`oracle 0.9 0.9`; `oracle 0 0.9`
is a liar), and the real suffix drafter on sampled tokens among which nothing repeats (`suffix`): what it costs to look
and find nothing. Ratios are of tokens a second while all streams decode. Tokens are compared one by one: steps of at
most 16 tokens compute what decoding does, bit by bit; larger ones may round near ties the other way, which is counted.

    python benchmarks/gpu_speculation.py --draft-model itself --streams 1 8 32
    python benchmarks/gpu_speculation.py --draft-model itself --draft-layers 2 --streams 1 8 32

A draft model instead: the target itself, whose greedy drafts are all accepted, or its first layers, whose drafts are as
good as none. One engine, greedy requests that speculate and that do not, in turn; it drafts at every step, whatever it
costs. `pass_ms` is what a forward pass of the draft model takes with all that belongs to it, prompts included.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sol import SamplingParams, __version__
from sol.assemble import build_core
from sol.config import EngineConfig
from sol.engine.core import EngineCore
from sol.engine.types import DrafterStats, EngineRequest, SpeculationParams
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


def run(
    core: EngineCore,
    streams: int,
    tokens: int,
    temperature: float,
    *,
    speculation: SpeculationParams | None = None,
    stats: list[DrafterStats] | None = None,
) -> tuple[float, dict[str, list[int]]]:
    """Tokens a second from the moment at which every stream has its first, and what each says. `stats` gets what steps
    say of drafters."""
    rng = random.Random(streams)
    requests = [
        EngineRequest(
            request_id=f"r{index}",
            prompt_token_ids=[rng.randrange(1000, 100_000) for _ in range(PROMPT)],
            params=SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True),
            seed=index,
            speculation=speculation,
        )
        for index in range(streams)
    ]
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    core.add(requests)
    started, count = None, 0
    while core.has_work:
        result = core.step()
        if stats is not None:
            stats += result.stats.drafters.values()
        for output in result.outputs:
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


def compare_draft_model(core: EngineCore, streams: int, tokens: int, pairs: int, most: int) -> dict[str, Any]:
    """`most`: drafts of a step."""
    off = SpeculationParams(enabled=False)
    run(core, streams, tokens, 0.0)
    ratios, rates, differing = [], [], 0
    stats: list[DrafterStats] = []
    for _ in range(pairs):
        before, wanted = run(core, streams, tokens, 0.0, speculation=off)
        after, found = run(core, streams, tokens, 0.0, stats=stats)
        ratios.append(after / before)
        rates.append(before)
        differing += sum(found[name] != wanted[name] for name in wanted)
    proposed = sum(one.num_proposed_tokens for one in stats)
    drafted = sum(one.num_draft_tokens for one in stats)
    accepted = sum(one.num_accepted_tokens for one in stats)
    seconds = sum(one.seconds for one in stats)
    return {
        "drafter": "draft_model",
        "streams": streams,
        "drafts_a_step": most,
        "plain_tok_s": round(statistics.median(rates), 1),
        "ratio": round(statistics.median(ratios), 4),
        "lowest": round(min(ratios), 4),
        "pass_ms": round(1000 * seconds * streams / max(1, proposed), 3),
        "drafted": drafted,
        "accepted": accepted,
        "failures": sum(one.num_failures for one in stats),
        "streams_that_differ": differing,
        "pairs": pairs,
    }


def draft_directory(args: argparse.Namespace, folder: Path) -> str:
    """The draft model that the command line asks for; one with fewer layers is written to `folder`."""
    name = args.model if args.draft_model == "itself" else args.draft_model
    if args.draft_layers is None:
        return str(name)
    config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = args.draft_layers
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def measure_draft_model(args: argparse.Namespace, common: Mapping[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        speculative = {
            "method": "draft_model",
            "model": draft_directory(args, Path(folder)),
            "num_speculative_tokens": args.num_speculative_tokens,
            "controller": "fixed",
        }
        began = time.perf_counter()
        core = build_core(EngineConfig(**common, speculative_config=speculative), progress=False)
        print(f"engine with a draft model after {time.perf_counter() - began:.0f} s", flush=True)
    rows = []
    for streams in args.streams:
        most = args.num_speculative_tokens
        rows.append(compare_draft_model(core, streams, args.tokens, args.pairs, most) | {"layers": args.draft_layers})
        print(rows[-1], flush=True)
    return rows


def measure_lookups(args: argparse.Namespace, common: Mapping[str, Any]) -> list[dict[str, Any]]:
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
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--drafters", nargs="+", default=["suffix", "oracle 0.9 0.9", "oracle 0.6 0.6", "oracle 0 0.9"])
    parser.add_argument("--draft-model", metavar="DIR", help='a model\'s configuration, or "itself"')
    parser.add_argument("--draft-layers", type=int, metavar="N", help="the first layers of it only")
    parser.add_argument("--num-speculative-tokens", type=int, default=4, metavar="N", help="of a draft model")
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
    rows = measure_draft_model(args, common) if args.draft_model else measure_lookups(args, common)
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
