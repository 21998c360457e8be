"""`sol tune` on the simulated server, where the whole grid can be tried: is the best found, and with how few trials?"""

from __future__ import annotations

import asyncio
from pathlib import Path

from common import Report
from measure_servers import Cores

from sol.bench import parse_slo
from sol.simulate import profile
from sol.tune import Goal, Parameter, Search, SimulatedRunner, Space, exhaustive, tune

SPACE = Space(
    [
        Parameter(name="max_num_seqs", values=(8, 16, 32, 64), demand="grows"),
        Parameter(name="max_num_batched_tokens", values=(128, 512, 2048), demand="grows"),
        Parameter(name="num_speculative_tokens", values=(0, 2, 4), demand="grows"),
    ]
)
MACHINES = {
    "l4-8b-int4": "ttft_p95<2s,tpot_p95<80ms",
    "h100-8b": "ttft_p95<500ms,tpot_p95<12ms",
    "cpu-small": "ttft_p95<20s,tpot_p95<300ms",
}
"""Profiles of the simulator, and what each is to meet."""


def measure_tuning(report: Report, _directory: Path, _cores: Cores) -> None:
    size = len(list(SPACE))
    machines = list(MACHINES.items())[: 1 if report.quick else None]
    num_requests, seeds = (100, 1) if report.quick else (300, 3)
    least, most_trials = 1.0, 0
    for name, slo in machines:
        goal, runner = Goal.of(slo), SimulatedRunner(profile(name), parse_slo(slo))
        search = Search(num_requests=num_requests)
        best = asyncio.run(exhaustive(runner, SPACE, goal, search=search))
        if best is None or best.score is None:
            raise RuntimeError(f"nothing on {name} meets {slo}: there is no best to be found")
        for seed in range(seeds):
            search = Search(trials=size // 4, num_requests=num_requests, seed=seed)
            result = asyncio.run(tune(runner, SPACE, goal, search=search))
            score = 0.0 if result.best is None or result.best.score is None else result.best.score
            least, most_trials = min(least, score / best.score), max(most_trials, result.num_started)
            report.row(
                machine=name, seed=seed, slo=slo, grid=size, trials=result.num_started, best_goodput=best.score,
                found_goodput=score, share=score / best.score,
                found=" ".join(str(v) for v in (result.best.config if result.best else {}).values()),
                best=" ".join(map(str, best.config.values())),
            )  # fmt: skip
    report.at_least("found_goodput_of_the_best", least, 0.95)
    report.at_most("trials_of_the_grid", most_trials / size, 0.25)
