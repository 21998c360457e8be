"""docs/troubleshooting.md speaks of flags, metrics and error codes that exist, and docs/serve.md of all codes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from sol import errors

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "troubleshooting.md").read_text()
SERVE = (DOCS / "serve.md").read_text()


def codes(base: type[errors.SolError] = errors.SolError) -> Iterator[str]:
    for kind in base.__subclasses__():
        if kind.__module__.startswith("sol.gateway"):  # docs/gateway.md has those, if a test has imported them
            continue
        if kind.code is not None:
            yield kind.code
        yield from codes(kind)


def test_every_code_that_a_client_may_get_is_documented() -> None:
    served = {code for code in codes() if code != "response_not_found"}
    assert served >= {"queue_full", "deadline_exceeded", "engine_dead"}
    assert {code for code in served if f"`{code}`" not in SERVE} == set()


def test_what_troubleshooting_names_is_documented() -> None:
    flags = set(re.findall(r"`(--[a-z-]+)", PAGE))
    metrics = set(re.findall(r"\b(?:vllm|sol):[a-z_]+", PAGE))
    assert len(flags) > 15
    assert len(metrics) > 8
    assert {flag for flag in flags if flag not in SERVE and flag not in ("--pid", "--version", "--json")} == set()
    assert {metric for metric in metrics if metric not in SERVE} == set()
    for code in re.findall(r"\| [45]\d\d `([a-z_]+)`", PAGE):
        assert f"`{code}`" in SERVE or code == "previous_response_id", code
