"""The engine's step on a GPU, taken apart: what the device needs for it, and what the host adds.

For each number of streams: the time of a decode step as a caller sees it, the same step replayed on the device alone,
and the host's own work. With the engine one step ahead, the first should be the second. Random weights in the shape
of Llama-3-8B, as in engine_matrix.py.

    python benchmarks/gpu_engine.py --check     # small: kernels and graphs against torch, on this card
    python benchmarks/gpu_engine.py --json benchmarks/results/h200-gpu-engine.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sol import SamplingParams, __version__
from sol.assemble import build_core
from sol.config import EngineConfig
from sol.engine.core import EngineCore
from sol.engine.types import EngineRequest
from sol.sampling import batched

MODEL = str(Path(__file__).with_name("llama-3-8b"))
PROMPT = 128
STREAMS = (1, 8, 32, 64, 128, 256)


def check_inputs() -> None:
    """The kernel that makes a decode step's inputs against its twin."""
    from sol.ops.gpu.batch import DeviceBatch
    from sol.ops.gpu.inputs import decode_inputs
    from sol.runner.device_rows import DeviceRows

    device = torch.device("cuda")
    size, max_blocks = 64, 600
    lengths = torch.randint(1, max_blocks * 16, (size,))
    new_blocks = torch.where(torch.rand(size) < 0.3, torch.randint(0, 9999, (size,)), -1)
    tokens = torch.where(torch.rand(size) < 0.5, torch.randint(0, 9999, (size,)), -1)
    inputs = torch.stack([torch.randperm(size), tokens, lengths, new_blocks]).to(device)
    table, last = torch.randint(0, 9999, (size, max_blocks)).int(), torch.randint(0, 9999, (size,))
    results = []
    for kernel in (True, False):
        rows = DeviceRows(size, max_blocks, 9999, device)
        rows.block_table[:size] = table.to(device)
        rows.last_token_ids[:size] = last.to(device)
        batch = DeviceBatch(
            token_ids=torch.full((size,), -9, device=device),
            positions=torch.full((size,), -9, device=device),
            slot_mapping=torch.full((size,), -9, device=device),
            block_table=torch.full((size, max_blocks), -9, dtype=torch.int32, device=device),
            query_start_loc=torch.arange(size + 1, dtype=torch.int32, device=device),
            seq_lens=torch.full((size,), -9, dtype=torch.int32, device=device),
            logits_rows=slice(None),
            max_query_len=1,
            max_seq_len=max_blocks * 16,
        )
        if kernel:
            decode_inputs(inputs, rows.block_table, rows.last_token_ids, batch, 16)
        else:
            rows.decode_inputs(inputs, batch, 16)
        seen = torch.arange(max_blocks, device=device) * 16 < lengths.to(device).unsqueeze(1)
        results.append([rows.block_table, batch.token_ids, batch.positions, batch.slot_mapping, batch.seq_lens])
        results[-1].append(torch.where(seen, batch.block_table, 0))
    assert all(torch.equal(found, wanted) for found, wanted in zip(*results, strict=True))
    print("inputs: as torch's")


def check_sampling(vocabulary: int, rounds: int) -> None:
    """The sampling kernels against torch on the same device, over many rows and positions."""
    from sol.ops.gpu import sampling
    from sol.sampling.processing import SamplingRow

    device = torch.device("cuda")
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=50),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=2.0, min_p=0.05),
        SamplingParams(temperature=1.5, top_k=1000, top_p=0.8, min_p=0.01),
    ]
    count, different = 48, 0
    for position in range(rounds):
        logits = torch.randn(count, vocabulary, device=device) * 3
        parameters = batched.SamplingParameters.empty(count, torch.device("cpu"))
        for index in range(count):
            parameters.fill(index, SamplingRow(kinds[index % len(kinds)], index, 0, [1] * 5, [], []))
        on_device = batched.SamplingParameters(*(tensor.to(device) for tensor in parameters.tensors()))
        rows = torch.arange(count, device=device)
        lengths = torch.full((count,), 5 + position, dtype=torch.int32, device=device)
        token_ids, last = torch.empty_like(rows), torch.empty_like(rows)
        sampling.sample_rows(logits, rows, lengths, on_device.tensors(), token_ids, last)
        wanted = batched.sample_rows(logits, rows, lengths, on_device)
        different += int((token_ids != wanted).sum())
    print(f"sampling: {different} of {rounds * count} tokens differ from torch's")
    assert different <= 2, "more than roundings at the edge of a cut explain"


def time_sampling() -> list[dict[str, Any]]:
    """Microseconds of the three launches, replayed from a graph, for logits as a language model has them."""
    from sol.ops.gpu import sampling
    from sol.sampling.processing import SamplingRow

    device = torch.device("cuda")
    kinds = {
        "greedy": SamplingParams(temperature=0.0),
        "temperature": SamplingParams(temperature=1.0),
        "top_p": SamplingParams(temperature=1.0, top_p=0.9),
        "top_k and top_p": SamplingParams(temperature=0.7, top_k=50, top_p=0.9),
        "top_p of a flat distribution": SamplingParams(temperature=100.0, top_p=0.9),
    }
    results = []
    for count in (1, 64, 256):
        logits = torch.randn(count, 128256, device=device) * 3
        rows = torch.arange(count, device=device)
        lengths = torch.full((count,), 9, dtype=torch.int32, device=device)
        token_ids, last = torch.empty_like(rows), torch.empty_like(rows)
        for name, params in kinds.items():
            parameters = batched.SamplingParameters.empty(count, torch.device("cpu"))
            for index in range(count):
                parameters.fill(index, SamplingRow(params, index, 0, [1] * 5, [], []))
            tensors = tuple(tensor.to(device) for tensor in parameters.tensors())
            sampling.sample_rows(logits, rows, lengths, tensors, token_ids, last)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                sampling.sample_rows(logits, rows, lengths, tensors, token_ids, last)
            microseconds = milliseconds_of(graph, 50) * 1e3
            results.append({"sampled_rows": count, "sampling": name, "us": round(microseconds, 1)})
            print(json.dumps(results[-1]), flush=True)
    return results


def milliseconds_of(graph: torch.cuda.CUDAGraph, times: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


def requests(count: int, max_tokens: int, *, seed: int = 0, length: int = PROMPT, **params: Any) -> list[EngineRequest]:
    rng = random.Random(seed)
    return [
        EngineRequest(
            request_id=f"{seed}-{index}",
            prompt_token_ids=[rng.randrange(1000, 120000) for _ in range(length)],
            params=SamplingParams(**({"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | params)),
            seed=index,
        )
        for index in range(count)
    ]


def drain(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step().outputs:
            assert output.error is None, output.error
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def check_engine(core: EngineCore) -> None:
    """Tokens alone and among others, from graphs of different sizes, and from the host's sampler."""
    graphs = core._runner._graphs  # type: ignore[attr-defined]
    for params in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "logprobs": 1}):
        wanted = requests(16, 24, **params)
        core.add(wanted)
        together = drain(core)
        alone = {}
        for request in wanted[:4]:
            core.add([request])
            alone |= drain(core)
        captured, buckets = graphs._graphs, graphs._buckets
        graphs._graphs, graphs._buckets = {}, []
        core.add(wanted)
        eager = drain(core)
        graphs._graphs, graphs._buckets = captured, buckets
        for name, other in (("alone", alone), ("without graphs", eager)):
            same = sum(together[key] == tokens for key, tokens in other.items())
            print(f"engine: {params}: {same} of {len(other)} requests get the same tokens {name}")


def timed(target: Any, name: str, spent: dict[str, float]) -> Callable[[], None]:
    """Add up the time in a method; what is returned undoes it."""
    original = getattr(target, name)

    def wrapper(*args: Any) -> Any:
        begin = time.perf_counter()
        result = original(*args)
        spent[name] = spent.get(name, 0.0) + time.perf_counter() - begin
        return result

    setattr(target, name, wrapper)
    return lambda: setattr(target, name, original)


def measure(core: EngineCore, streams: int, *, steps: int = 60, **params: Any) -> dict[str, float]:
    """Milliseconds a step."""
    core.add(requests(streams, 2 * steps + 40, seed=streams, **params))
    for _ in range(30 + streams * PROMPT // 8192):
        core.step()
    runner = core._runner
    size = runner._graphs.padded(streams)  # type: ignore[attr-defined]
    walls = []
    for _ in range(steps):
        begin = time.perf_counter()
        core.step()
        walls.append(time.perf_counter() - begin)
    spent: dict[str, float] = {}
    undo = [timed(core._scheduler, "schedule", spent), timed(core._scheduler, "update_from_output", spent)]
    undo.append(timed(runner, "submit", spent))
    for _ in range(steps // 2):
        core.step()
    for restore in undo:
        restore()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(steps):
        runner._graphs.run(size)  # type: ignore[attr-defined]
    end.record()
    torch.cuda.synchronize()
    core.abort([f"{streams}-{index}" for index in range(streams)])
    drain(core)
    return {
        "step_ms": round(statistics.median(walls) * 1e3, 4),
        "device_ms": round(begin.elapsed_time(end) / steps, 4),
        **{f"host_{name}_ms": round(value / (steps // 2) * 1e3, 4) for name, value in spent.items()},
    }


@torch.inference_mode()
def measure_verification(core: EngineCore, tokens: int, *, context: int = PROMPT, steps: int = 60) -> dict[str, float]:
    """Milliseconds of a forward pass of so many tokens of one request, in a graph, without sampling."""
    from sol.ops.gpu.batch import DeviceBatch
    from sol.ops.program import run

    graphs = core._runner._graphs  # type: ignore[attr-defined]
    device = torch.device("cuda")
    length = context + tokens
    batch: Any = DeviceBatch(
        token_ids=torch.arange(1000, 1000 + tokens, device=device),
        positions=torch.arange(context, length, device=device),
        slot_mapping=torch.arange(context, length, device=device),
        block_table=torch.arange(-(-length // 16), dtype=torch.int32, device=device).unsqueeze(0),
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
        logits_rows=slice(None),
        max_query_len=tokens,
        max_seq_len=core.info.max_model_len,
    )
    run(graphs._program, graphs._ops, batch, graphs._kv_cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(graphs._program, graphs._ops, batch, graphs._kv_cache)
    return {"device_ms": round(milliseconds_of(graph, steps), 4)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--check-kernels", action="store_true", help="these alone, and nothing else: for a sanitizer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.check or args.check_kernels:
        check_inputs()
        check_sampling(128256, 20 if args.check else 1)
        check_sampling(5000, 2)
    if args.check_kernels:
        return
    begin = time.perf_counter()
    config = EngineConfig(
        model=MODEL,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        gpu_memory_utilization=0.9,
        enable_prefix_caching=False,
        speculation="off",  # a step is one token of each stream
    )
    core = build_core(config, progress=False)
    startup = time.perf_counter() - begin
    print(f"start-up {startup:.1f} s; {core.info.num_blocks} blocks of KV cache")
    if args.check:
        check_engine(core)
    rows: list[dict[str, Any]] = time_sampling()
    for streams in STREAMS:
        for name, params in (("greedy", {}), ("top_p", {"temperature": 1.0, "top_p": 0.9, "top_k": 50})):
            row = {"streams": streams, "sampling": name, **measure(core, streams, **params)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    for tokens in (6, 16):
        row = {"verified_tokens": tokens, **measure_verification(core, tokens)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.json:
        result = {
            "benchmark": "gpu_engine",
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            "machine": {"gpu": torch.cuda.get_device_name()},
            "versions": {"sol": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "startup_s": startup,
            "rows": rows,
        }
        args.json.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
