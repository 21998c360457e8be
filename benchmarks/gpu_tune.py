"""Search for the block sizes of each projection: compiled by many processes, timed by one."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import random
from collections.abc import Callable
from typing import Any

import torch
from gpu_model import Projection, Shape

from sol.ops.gpu.tuning import LinearConfig

SHARED_BYTES = 200 << 10


def candidates(projection: Projection, tokens: int, trials: int) -> list[LinearConfig]:
    """A random choice among those that fit and that give every processor work."""
    found = []
    splits = [1] if projection.normed else [1, 2, 4, 7, 8]
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
                            and in_flight >= 24 << 10
                            and block_rows * tokens <= 4096 * warps
                            and block_k * tokens <= 2048 * warps
                            and block_rows * block_k >= 512 * warps
                            and (split_k == 1 or projection.columns // split_k >= 8 * block_k)
                        ):
                            found.append(LinearConfig(tokens, block_rows, block_k, split_k, warps, stages, 4))
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
            try:
                projection(weight, config)
            except Exception as error:  # out of shared memory or registers: not a candidate
                print("#", name, config, type(error).__name__, flush=True)


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
        best = _round(add, timed, shape, device, jobs, pool, processes)
        again = {}
        for key, ranked in best.items():
            again[key] = [
                dataclasses.replace(config, prefetch=prefetch)
                for _, config in ranked[:4]
                for prefetch in (0, 2, 8, 16)
                if prefetch * config.block_k <= shape_columns(shape, key[0]) // config.split_k
            ]
        second = _round(add, timed, shape, device, again, pool, processes)
    for (name, tokens), ranked in second.items():
        every = sorted([*ranked, *best[name, tokens]], key=lambda pair: pair[0])
        projection = Projection(shape, name, tokens, device)
        config = dataclasses.asdict(every[0][1])
        del config["block_tokens"]
        size = projection.rows * projection.columns * 2
        add("tuned", matrix=name, tokens=tokens, us=every[0][0] * 1e3, gb_s=size / every[0][0] / 1e6,
            without_prefetch_us=min((ms for ms, c in every if c.prefetch == 0), default=0.0) * 1e3)  # fmt: skip
        line = {"rows": projection.rows, "columns": projection.columns, "tokens": tokens}
        line |= {"norm": projection.normed, "paired": projection.paired}
        print(json.dumps(line | {"config": config}), flush=True)
        for ms, other in every[1:4]:
            print("#   next", f"{ms * 1e3:.2f} us", other, flush=True)


def shape_columns(shape: Shape, name: str) -> int:
    return next(columns for other, _, columns, _, _ in shape.matrices() if other == name)


def _round(
    add: Callable[..., None],
    timed: Callable[..., float],
    shape: Shape,
    device: torch.device,
    jobs: dict[tuple[str, int], list[LinearConfig]],
    pool: Any,
    processes: int,
) -> dict[tuple[str, int], list[tuple[float, LinearConfig]]]:
    """Milliseconds and configuration, best first, of each job."""
    if device.type == "cuda":
        tasks = [(shape, name, tokens, configs[i::4]) for (name, tokens), configs in jobs.items() for i in range(4)]
        pool.map(_compile, tasks, chunksize=1)
    ranked = {}
    for (name, tokens), configs in jobs.items():
        projection = Projection(shape, name, tokens, device)
        count = max(2, min(16, int(6e8 // (projection.rows * projection.columns * 2))))
        weights = [
            torch.randn(projection.rows, projection.columns, device=device).to(projection.x.dtype) for _ in range(count)
        ]
        times = []
        for config in configs:
            try:
                ms = timed(
                    lambda: [projection(weight, config) for weight in weights],  # noqa: B023
                    launches=count,
                    repeats=5,
                )
            except Exception as error:
                print("#", name, config, type(error).__name__, flush=True)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                continue
            times.append((ms, config))
        ranked[name, tokens] = sorted(times, key=lambda pair: pair[0])
    return ranked
