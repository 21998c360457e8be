"""A few hundred of the inputs that benchmarks/server_fuzz.py runs 200,000 of, and those that once failed."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from sol.text import template_sandbox

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from fuzz_seeds import WORDS
from fuzz_targets import TARGETS, mutate

FAILED: dict[str, list[bytes]] = {"grammars": [b"25", b"2null", b'0{"type":"integer","multipleOf":1000003}']}
"""By target."""


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_that_nobody_should_send(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    target, random_ = TARGETS[name], random.Random(0)
    for data in [b"", *target.seeds, *FAILED.get(name, ())]:
        target.run(data)
    for _ in range(300):
        target.run(mutate(random_, random_.choice(target.seeds), WORDS[name], target.seeds))
