"""What the parts of gateway.py share: a gateway in front of simulated engines, and a client that keeps count."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure_servers import MODEL, Served, serving

RULES: list[dict[str, Any]] = [
    {"name": "size", "kind": "size", "max_bytes": 1_000_000, "max_messages": 200, "max_input_tokens": 100_000},
    {
        "name": "words",
        "kind": "words",
        "words": [f"secret project {number}" for number in range(1000)],
        "direction": "both",
        "action": "redact",
    },
    {
        "name": "regex",
        "kind": "regex",
        "patterns": [r"\bproject-[0-9]{4}\b", r"\binternal use only\b"],
        "direction": "both",
    },
    {"name": "injection", "kind": "injection"},
]
"""Rule filters: words, expressions and signs of injection. Personal data and classifiers are gateway_filters.py's."""


@contextmanager
def gateway(directory: Path, engines: Mapping[str, Served], core: int | None, **sections: Any) -> Iterator[Served]:
    """`sol gateway` in front of them, all serving one model."""
    data = {
        "models": [{"name": MODEL, "engines": list(engines)}],
        "engines": [{"name": name, "url": engine.url, "driver": "sol"} for name, engine in engines.items()],
        **sections,
    }
    file = directory / "gateway.yaml"
    file.write_text(json.dumps(data))
    with serving([sys.executable, "-m", "sol", "gateway", "--config", str(file)], core=core) as found:
        yield found


@contextmanager
def staying_on(core: int | None) -> Iterator[None]:
    """This process, which is the client of some parts, on the core of those that measure."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
