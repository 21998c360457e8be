"""Search for the block sizes of each projection: compiled by many processes, timed by one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import random
from collections.abc import Callable
from typing import Any

import torch
from gpu_model import DecodeBatch, Projection, Shape, make_program
from triton.runtime.errors import OutOfResources

from sol.ops import KVCache, run
from sol.ops.gpu.attention import AttentionConfig, AttentionInputs, ManyConfig, attend
from sol.ops.gpu.launch import Counters
from sol.ops.gpu.ops import GpuOps
from sol.ops.gpu.tuning import LinearConfig, linear_config, table

SHARED_BYTES = 200 << 10


def candidates(projection: Projection, tokens: int, trials: int) -> list[LinearConfig]:
    """A random choice among those that fit and that give every processor work."""
    found = []
    splits = [1, 2, 4, 7, 8] if projection.rows < 8192 else [1]
    for block_rows in (16, 32, 64, 128):
        for block_k in (64, 128, 256, 512):
            for split_k in splits:
                for warps in (2, 4, 8):
                    for stages in (3, 4, 5, 6):
                        programs = projection.rows / block_rows * split_k
                        bytes_each = stages * (block_rows + tokens) * block_k * 2
                        resident = min(programs / 132, 227 * 1024 / (bytes_each + 2048))
                        in_flight = resident * (stages - 1) * block_rows * block_k * 2
                        if (
                            projection.columns % (block_k * split_k) == 0
                            and bytes_each <= SHARED_BYTES
                            and programs >= 120
                            and in_flight >= 16 << 10
                            and block_rows * tokens <= 4096 * warps
                            and block_k * tokens <= 4096 * warps
                            and block_rows * block_k >= 512 * warps
                            and (split_k == 1 or projection.columns // split_k >= 8 * block_k)
                        ):
                            found.append(LinearConfig(tokens, block_rows, block_k, split_k, warps, stages))
    random.Random(0).shuffle(found)
    return found[:trials]


def _compile(task: tuple[Shape, str, int, list[LinearConfig]]) -> None:
    """Into Triton's cache on disk."""
    shape, name, tokens, configs = task
    device = torch.device("cuda")
    with torch.inference_mode():
        projection = Projection(shape, name, tokens, device)
        weight = torch.zeros(projection.rows, projection.columns, device=device, dtype=torch.bfloat16)
        for config in configs:
            with contextlib.suppress(OutOfResources):
                projection(weight, config)


def tune(
    add: Callable[..., None],
    timed: Callable[..., float],
    shape: Shape,
    device: torch.device,
    classes: list[int],
    trials: int,
    processes: int,
) -> None:
    jobs = {}
    for tokens in classes:
        for name, *_ in shape.matrices():
            jobs[name, tokens] = candidates(Projection(shape, name, tokens, device), tokens, trials)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        best = _round(timed, shape, device, jobs, pool)
        for tokens in classes:
            ranked = {name: [c for _, c in best[name, tokens][:12]] for name, *_ in shape.matrices()}
            variants = {
                name: [dataclasses.replace(config, early=early) for config in configs for early in (False, True)]
                for name, configs in ranked.items()
            }
            if device.type == "cuda":
                pool.map(_compile, [(shape, n, tokens, v[i::4]) for n, v in variants.items() for i in range(4)], 1)
            chosen = _in_company(add, timed, shape, device, tokens, variants)
            for name, config in chosen.items():
                _, rows, columns = next(m for m in shape.matrices() if m[0] == name)
                alone = best[name, tokens][0]
                add("tuned", matrix=name, tokens=tokens, alone_us=alone[0] * 1e3,
                    alone_gb_s=rows * columns * 2 / alone[0] / 1e6, alone=str(alone[1]))  # fmt: skip
                values = dataclasses.asdict(config)
                del values["block_tokens"]
                print(json.dumps({"rows": rows, "columns": columns, "tokens": tokens, "config": values}), flush=True)


def _in_company(
    add: Callable[..., None],
    timed: Callable[..., float],
    shape: Shape,
    device: torch.device,
    tokens: int,
    variants: dict[str, list[LinearConfig]],
) -> dict[str, LinearConfig]:
    """One matrix after the other, twice: the configuration with which a few layers and the head are fastest."""
    shape = dataclasses.replace(shape, layers=min(shape.layers, 6))
    program = make_program(shape, device)
    batch = DecodeBatch(shape, 8 if tokens == 16 else tokens, min(128, shape.max_len), 1, device)
    cache, ops = KVCache(batch.cache), GpuOps(device)
    sizes = {name: (rows, columns, tokens) for name, rows, columns in shape.matrices()}

    def measure(name: str, config: LinearConfig) -> float:
        table()[sizes[name]] = config
        linear_config.cache_clear()
        return timed(lambda: run(program, ops, batch.batch, cache), repeats=7)

    chosen = {name: configs[0] for name, configs in variants.items()}
    for name, config in chosen.items():
        best = measure(name, config)
    first = best
    for _ in range(2):
        for name, configs in variants.items():
            times = {config: measure(name, config) for config in configs}
            fastest = min(times, key=lambda config: times[config])
            if times[fastest] < 0.998 * measure(name, chosen[name]):
                chosen[name] = fastest
            best = measure(name, chosen[name])
    add("tuned_layers", layers=shape.layers, tokens=tokens, ms=best, as_tuned_alone_ms=first)
    return chosen


def _round(
    timed: Callable[..., float],
    shape: Shape,
    device: torch.device,
    jobs: dict[tuple[str, int], list[LinearConfig]],
    pool: Any,
) -> dict[tuple[str, int], list[tuple[float, LinearConfig]]]:
    """Milliseconds and configuration, best first, of each job."""
    if device.type == "cuda":
        tasks = [(shape, name, tokens, configs[i::8]) for (name, tokens), configs in jobs.items() for i in range(8)]
        pool.map(_compile, tasks, chunksize=1)
    ranked = {}
    for (name, tokens), configs in jobs.items():
        projection = Projection(shape, name, tokens, device)
        count = max(2, min(16, int(6e8 // (projection.rows * projection.columns * 2))))
        size = (projection.rows, projection.columns)
        weights = [torch.randn(size, device=device).to(projection.x.dtype) for _ in range(count)]
        times = []
        for config in configs:
            try:
                ms = timed(
                    lambda: [projection(weight, config) for weight in weights],  # noqa: B023
                    launches=count,
                    repeats=5,
                )
            except OutOfResources:
                continue
            times.append((ms, config))
        ranked[name, tokens] = sorted(times, key=lambda pair: pair[0])
    return ranked


def tune_attention(
    add: Callable[..., None], timed: Callable[..., float], shape: Shape, device: torch.device, processes: int
) -> None:
    """The block sizes of attention, over the layers of a step."""
    shape = dataclasses.replace(shape, layers=min(shape.layers, 16))
    few = [
        AttentionConfig(few_block_n=n, few_warps=warps, few_stages=stages, deep_stages=stages)
        for n in (32, 64, 128)
        for warps in (1, 2, 4, 8)
        for stages in (3, 5, 7, 9)  # of which half are buffers: a key's place is itself read from the block table
        if 8 * warps <= n <= 64 * warps
    ]
    tiles = [
        ManyConfig(m, n, warps, stages)
        for m, warps in ((64, 4), (128, 4), (128, 8), (256, 8))
        for n in (32, 64, 128)
        for stages in (3, 5)
    ]
    many = [AttentionConfig(many=tile, large=tile) for tile in tiles]
    if device.type == "cuda":
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            pool.map(_compile_attention, [(shape, configs) for configs in (*((c,) for c in few + many),)], 1)
    cases = [
        (1, 128, 1),
        (1, 2048, 1),
        (8, 2048, 1),
        (32, 2048, 1),
        (64, 128, 1),
        (256, 128, 1),
        (1, 2048, 2048),
        (1, 8000, 2048),
    ]
    counters = Counters(device)
    for requests, context, query_len in cases:
        batch = DecodeBatch(shape, requests, context, query_len, device)
        q = torch.randn(requests * query_len, shape.heads, shape.size, device=device).to(batch.cache.dtype)
        inputs = AttentionInputs(
            batch.batch, shape.heads, shape.kv_heads, shape.size, 1 if query_len == 1 else 0, query_len > 1, counters
        )
        times = []
        configs = (
            many if query_len > 1 else [dataclasses.replace(c, few_programs=n) for c in few for n in (1, 2, 4, 8, 16)]
        )
        for config in configs:
            try:
                ms = timed(
                    lambda: [attend(q, k, v, inputs, scale=0.1, config=config) for k, v in batch.cache],  # noqa: B023
                    launches=shape.layers,
                    repeats=5,
                )
            except OutOfResources:
                continue
            times.append((ms, config))
        times.sort(key=lambda pair: pair[0])
        usual = timed(
            lambda: [attend(q, k, v, inputs, scale=0.1) for k, v in batch.cache],  # noqa: B023
            launches=shape.layers,
            repeats=5,
        )
        size = requests * context * shape.kv_heads * shape.size * 4
        for ms, config in times[:8]:
            add("attention", requests=requests, context=context, query_len=query_len, us=ms * 1e3,
                gb_s=size / ms / 1e6, default_us=usual * 1e3, config=list(dataclasses.astuple(config)))  # fmt: skip


def _compile_attention(task: tuple[Shape, tuple[AttentionConfig, ...]]) -> None:
    shape, configs = task
    device = torch.device("cuda")
    shape = dataclasses.replace(shape, layers=1)
    with torch.inference_mode():
        for query_len in (1, 32):
            batch = DecodeBatch(shape, 1, 300, query_len, device)
            q = torch.randn(query_len, shape.heads, shape.size, device=device).to(batch.cache.dtype)
            few = 1 if query_len == 1 else 0
            inputs = AttentionInputs(
                batch.batch, shape.heads, shape.kv_heads, shape.size, few, query_len > 1, Counters(device)
            )
            for config in configs:
                with contextlib.suppress(OutOfResources):
                    attend(q, *batch.cache[0], inputs, scale=0.1, config=config)
