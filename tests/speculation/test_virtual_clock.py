"""The benchmark of the controller, reduced: on a virtual clock, so its figures are exact and its bars always hold."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("common", "speculation_workloads", "speculation_engine", "speculation_clock")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("speculation_clock")


@pytest.mark.parametrize("workload", ["copy", "chat", "adversarial"])
@pytest.mark.parametrize("streams", [1, 16, 128])
def test_the_controller_reaches_plain_decoding_and_the_best_fixed_setting(
    clock: ModuleType, workload: str, streams: int
) -> None:
    table = clock.CostTable(BENCHMARKS / "results" / "h200-verify-costs.json")
    settings = [("suffix", 16)] if streams < 128 else [("suffix", 3)]
    seeds = (0, 1) if streams < 128 else (0,)
    compared = clock.compare([clock.Cell(table, workload, streams, seed=seed) for seed in seeds], settings)
    assert compared["over_plain"] >= 0.98
    assert compared["over_best_fixed"] >= 0.98


def test_a_clock_that_is_virtual_gives_the_same_figures_again(clock: ModuleType) -> None:
    table = clock.CostTable(BENCHMARKS / "results" / "h200-verify-costs.json")
    assert clock.Cell(table, "chat", 2).goodput() == clock.Cell(table, "chat", 2).goodput()
