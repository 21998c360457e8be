"""The benchmark of the controller, reduced: on a virtual clock, so its figures are exact and its bars always hold."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sol.speculation.plan.arithmetic import PythonArithmetic

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("common", "speculation_workloads", "speculation_engine", "speculation_clock")

DECIDING_COUNTS = [("copy", 16), ("copy", 128)]
"""Cells in which the host's time for many requests with drafts is 2 or 3% of a step: see docs/kernels.md"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("speculation_clock")


@pytest.mark.parametrize("workload", ["copy", "chat", "adversarial"])
@pytest.mark.parametrize("streams", [1, 16, 128])
def test_the_controller_reaches_plain_decoding_and_the_best_fixed_setting(
    clock: ModuleType, workload: str, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = clock.CostTable(BENCHMARKS / "results" / "h200-verify-costs.json")
    settings = [("suffix", 16)] if streams < 128 else [("suffix", 3)]
    seeds = (0, 1) if streams < 128 else (0,)
    cells = [clock.Cell(table, workload, streams, seed=seed) for seed in seeds]
    compared = clock.compare(cells, settings)
    assert compared["over_plain"] >= 0.98
    if (workload, streams) not in DECIDING_COUNTS:
        assert compared["over_best_fixed"] >= 0.98
        return
    assert compared["over_best_fixed"] >= 0.96
    # What it decides is right: it would be there if deciding took no longer than a fixed setting's books.
    engine = sys.modules["speculation_engine"]
    for name, value in (("STEP", engine.FIXED_STEP), ("ROW", engine.FIXED_ROW), ("DRAFT", 0.0)):
        monkeypatch.setattr(engine, f"CONTROLLER_{name}", value)
    best = compared["plain_tokens_per_s"] * compared["best_fixed_over_plain"]
    assert clock.together([cell.goodput() for cell in cells]) >= 0.98 * best


def test_a_clock_that_is_virtual_gives_the_same_figures_again(clock: ModuleType) -> None:
    table = clock.CostTable(BENCHMARKS / "results" / "h200-verify-costs.json")
    assert clock.Cell(table, "chat", 2).goodput() == clock.Cell(table, "chat", 2).goodput()


def test_python_and_the_library_draft_alike(clock: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token for token: what is decided must not depend on whether there was a compiler."""
    table = clock.CostTable(BENCHMARKS / "results" / "h200-verify-costs.json")
    native = clock.Cell(table, "copy", 8).goodput()
    monkeypatch.setattr(clock, "best_arithmetic", PythonArithmetic)
    assert clock.Cell(table, "copy", 8).goodput() == native
