"""Progress in a terminal, in a log, and not at all."""

from __future__ import annotations

import io
import sys

import pytest

from sol import progress
from sol.progress import Progress, Unit


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_in_a_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Progress(4, "Requests") as bar:
        bar.advance()
        clock[0] = 6.0
        bar.advance(2)
        bar.advance()
    captured = capsys.readouterr()
    assert captured.err == "Requests: 3 of 4\nRequests: 4 of 4\n"
    assert captured.out == ""


def test_bytes_are_megabytes(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(98_362_432, "Weights", unit="bytes") as bar:
        bar.advance(98_362_432)
    assert capsys.readouterr().err == "Weights: 98 of 98 MB\n"


def test_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress(2, "Weights", show=False) as bar:
            bar.advance(2)
        assert stream.getvalue() == ""


@pytest.mark.parametrize(("unit", "amount"), [("items", "2/2"), ("bytes", "2/2 bytes")])
def test_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch, unit: Unit, amount: str) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with Progress(2, "Weights", unit=unit) as bar:
        bar.advance(2)
    assert "Weights" in terminal.getvalue()
    assert amount in terminal.getvalue()


def test_terminal_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(sys.modules, "rich", None)
    with Progress(2, "Weights") as bar:
        bar.advance(2)
    assert terminal.getvalue() == "Weights: 2 of 2\n"


def test_failure_does_not_claim_to_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), Progress(2, "Weights"):
        raise ZeroDivisionError
    assert capsys.readouterr().err == ""
