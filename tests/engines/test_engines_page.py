"""The tables of docs/gateway.md about engines say what the drivers do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_drivers import EVERYTHING

from sol.engines.drivers import DRIVERS, driver_named
from sol.engines.spec import EngineSpec, engine_spec
from sol.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
VALUES = {"kv_cache_dtype": {"tgi": "fp8_e5m2", "llama.cpp": "q8_0"}}


def table(first_row: str) -> list[list[str]]:
    """Rows of cells, the heading first, of the table with a row that begins so."""
    block = next(block for block in PAGE.split("\n\n") if f"\n{first_row}" in block)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
    return [rows[0], *rows[2:]]


def test_every_option_s_flag(tmp_path: Path) -> None:
    heading, *rows = table("| `served_model_name` |")
    assert heading[1:] == [name for name in DRIVERS if name != "openai"]
    assert [row[0].strip("`") for row in rows] == [name for name in EVERYTHING if name != "speculation"]
    for option, *cells in rows:
        name = option.strip("`")
        for engine, cell in zip(heading[1:], cells, strict=True):
            value = VALUES.get(name, {}).get(engine, EVERYTHING[name])
            spec = engine_spec({"model": "m", name: value})
            if cell == "–":
                with pytest.raises(ConfigError, match=name):
                    driver_named(engine).command(spec, port=1, directory=tmp_path)
                continue
            command = driver_named(engine).command(spec, port=1, directory=tmp_path)
            bare = driver_named(engine).command(EngineSpec(model="m"), port=1, directory=tmp_path)
            added = {word for word in command.argv if word.startswith("--")} - set(bare.argv)
            documented = set(re.findall(r"`([^`]+)`", cell))
            assert documented
            if any(word.startswith("--") for word in documented):
                assert added == documented, (name, engine)
            else:  # a variable, or a key of a file
                assert not added
                assert engine in ("tgi", "tensorrt-llm")


def test_every_method_of_speculation() -> None:
    _, *rows = table("| sol | `ngram`")
    assert {row[0]: tuple(re.findall(r"`(\w+)`", row[1])) for row in rows} == {
        name: tuple(driver.methods) for name, driver in DRIVERS.items() if driver.methods
    }


def test_what_is_read_of_each_engine() -> None:
    heading, *rows = table("| sol | `/health`")
    assert len(heading) == 9
    assert [row[0] for row in rows] == list(DRIVERS)
    for row in rows:
        driver = driver_named(row[0])
        names = driver.metric_names
        assert row[1].strip("`") == driver.ready_path
        assert row[2] == (f"`{driver.metrics_path}`" if driver.metrics_path else "–")
        there = [
            names.running and names.waiting, names.kv_usage, names.prefix_hits or names.prefix_hit_rate,
            names.accepted_tokens or names.acceptance_rate, names.progress, driver.drains,
        ]  # fmt: skip
        assert [cell != "–" for cell in row[3:]] == [bool(each) for each in there], row[0]
