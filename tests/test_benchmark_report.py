"""What every benchmark prints and how it exits, and the verdicts of the serving benchmark."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "common", raising=False)
    return importlib.import_module("common")


def test_the_last_line_is_json_and_a_fallen_bar_fails(
    common: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = common.Report("subject", quick=True)
    report.row(name="a", value=1.25)
    report.row(name="b", other=300.0)
    report.at_least("fast", 2.0, 1.5)
    report.at_most("small", 0.04, 0.05)
    assert report.finish(tmp_path / "results" / "out.json") == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads((tmp_path / "results" / "out.json").read_text())
    assert printed["benchmark"] == "subject"
    assert printed["rows"] == [{"name": "a", "value": 1.25}, {"name": "b", "other": 300.0}]
    assert printed["bars"] == {"fast": [2.0, 1.5, True], "small": [0.04, 0.05, True]}
    assert printed["machine"]["cores"] >= 1
    assert {"sol", "torch", "python"} <= printed["versions"].keys()
    assert printed["date"][:2] == "20"

    report.more_than("ahead", 1.0, 1.0)
    assert report.finish(None) == 1
    assert "NO" in capsys.readouterr().out


def test_a_text_is_the_same_a_tie_or_wrong(common: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = importlib.import_module("serve")
    alone = serve.Alone("p", "one two three", offsets=[0, 3, 7], margins=[2.0, 0.0001, 3.0])
    assert alone.compare("one two three") == "same"
    assert alone.compare("one six eight") == "tie"
    assert alone.compare("ten two three") == "wrong"
    certain = serve.Alone("p", "one two three", offsets=[0, 3, 7], margins=[2.0, 2.0, 3.0])
    assert certain.compare("one six eight") == "wrong"
    assert certain.compare("one two") == "wrong", "cut short"
