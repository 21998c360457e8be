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
@pytest.mark.parametrize("streams", [1, 16])
def test_the_controller_reaches_plain_decoding_and_the_best_fixed_setting(
    clock: ModuleType, workload: str, streams: int
) -> None:
    table = clock.CostTable(BENCHMARKS / "results" / "h200-verify-costs.json")
    cell = clock.Cell(table, workload, streams)
    reached, plain = cell.goodput(), cell.plain()
    assert reached.tokens_per_second >= 0.98 * plain.tokens_per_second
    fixed = max(cell.fixed("suffix", count).later_tokens_per_second for count in (3, 16))
    assert reached.later_tokens_per_second >= 0.98 * max(fixed, plain.later_tokens_per_second)


def test_a_clock_that_is_virtual_gives_the_same_figures_again(clock: ModuleType) -> None:
    table = clock.CostTable(BENCHMARKS / "results" / "h200-verify-costs.json")
    assert clock.Cell(table, "chat", 2).goodput() == clock.Cell(table, "chat", 2).goodput()
