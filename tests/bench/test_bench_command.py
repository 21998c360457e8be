"""`sol bench` as a user runs it."""

from __future__ import annotations

import csv
import html.parser
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sol.bench.progress import describe
from sol.bench.run import Tally
from sol.bench.svg import Series, plot
from sol.cli import build_parser, main
from sol.simulate import profile
from sol.simulate.config import SimulateConfig
from sol.simulate.server import in_thread


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    laws = profile("fast", num_speculative_tokens=3)
    with in_thread(SimulateConfig(laws=laws, port=0)) as server:
        yield server.url


class Page(html.parser.HTMLParser):
    """Checks that elements are closed, and notes what they ask the network for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_one_load_and_its_three_files(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", url, "--rate", "60", "--duration", "0.8", "--slo", "ttft_p50<60s,e2e_p50<60s", "--quiet"]
    words += ["--price-per-hour", "3.6", "--tasks", "chat", "--output-tokens", "12", "--seed", "5"]
    words += ["--output", str(tmp_path / "run"), "--save-text", "--save-timelines", "--api-key", "s3cret"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"SLO +met: TTFT p50 < 60000 ms met", out)
    assert re.search(r"TTFT +[\d.,]+ ms", out)

    text = (tmp_path / "run.json").read_text()
    document = json.loads(text)
    assert document["format"] == "sol-bench/1"
    assert document["endpoint"]["model"] == "simulated"
    assert document["endpoint"]["counting"] == "segments"
    assert document["data"]["tasks"] == ["chat"]
    assert document["options"]["rate"] == [60.0]
    assert document["seed"] == 5
    assert document["client_machine"]["cores"] == os.cpu_count()
    assert document["client_packages"]["httptools"]
    (stage,) = document["stages"]
    requests = stage["requests"]
    rows = [dict(zip(requests["columns"], row, strict=True)) for row in requests["rows"]]
    assert len(rows) == stage["load"]["num_conversations"] > 20
    assert {row["output_tokens"] for row in rows} == {12}
    for row, times, tokens in zip(rows, requests["arrivals"], requests["arrival_tokens"], strict=True):
        assert sum(tokens) == 12
        assert times[0] - row["intended"] == pytest.approx(row["ttft"], abs=1e-6)
        assert row["tpot"] == pytest.approx((row["e2e"] - row["ttft"]) / 11, abs=1e-6)
    assert all(requests["texts"])
    summary = stage["summary"]
    assert summary["tokens_per_chunk"] > 1
    output = summary["output_tokens_per_second"]["value"]
    assert stage["cost"]["output"]["value"] == pytest.approx(3.6 / 3600 / output * 1e6, rel=1e-6)
    assert stage["cost"]["good"]["value"] is not None

    lines = list(csv.DictReader((tmp_path / "run.csv").read_text().splitlines()))
    assert [line["key"] for line in lines] == [row["key"] for row in rows]
    assert float(lines[3]["ttft"]) == pytest.approx(rows[3]["ttft"], abs=1e-6)

    page_text = (tmp_path / "run.html").read_text()
    page = Page(page_text)
    assert page.open == []
    assert page.addresses == []  # one file, and nothing else
    assert "script" not in page.tags
    assert page.tags.count("svg") >= 6
    assert "s3cret" not in text + page_text


def test_several_loads_use_other_prompts_and_are_compared(url: str, tmp_path: Path) -> None:
    words = ["bench", url, "--concurrency", "1,3", "--num-requests", "12", "--input-tokens", "20"]
    words += ["--output-tokens", "5", "--output", str(tmp_path / "run"), "--no-scrape", "--quiet"]
    assert main(words) == 0
    document = json.loads((tmp_path / "run.json").read_text())
    keys = [[row[1] for row in stage["requests"]["rows"]] for stage in document["stages"]]
    assert [len(one) for one in keys] == [12, 12]
    assert not set(keys[0]) & set(keys[1])
    assert [stage["server_series"] for stage in document["stages"]] == [{}, {}]
    assert "1 at a time" in (tmp_path / "run.html").read_text()


def test_a_sweep_ends_where_more_at_a_time_bring_nothing(tmp_path: Path) -> None:
    # Two at a time is all that this server does.
    laws = profile("fast", max_num_seqs=2, step_seconds=0.004)
    with in_thread(SimulateConfig(laws=laws, port=0)) as server:
        words = ["bench", server.url, "--sweep", "--num-requests", "12", "--input-tokens", "20", "--quiet"]
        assert main([*words, "--output-tokens", "10", "--output", str(tmp_path / "run")]) == 0
    document = json.loads((tmp_path / "run.json").read_text())
    levels = [stage["load"]["concurrency"] for stage in document["stages"]]
    assert levels == [1, 2, 4, 8, 16][: len(levels)]
    # A machine that is busy with other things ends it early, and says so.
    assert len(levels) >= 2 or document["stages"][0]["summary"]["client"]["limited"]


def test_a_missed_objective_is_exit_code_1(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", url, "--concurrency", "2", "--num-requests", "20", "--slo", "ttft_p50<1us", "--quiet"]
    assert main([*words, "--output", str(tmp_path / "run"), "--format", "csv"]) == 1
    assert "TTFT p50 < 0.001 ms missed" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["run.csv"]


def test_a_trace_is_replayed(url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(
        json.dumps({"timestamp": 40 * i, "input_length": 600, "output_length": 3 + i, "hash_ids": [1, 2 + i]})
        for i in range(8)
    ))  # fmt: skip
    words = ["bench", url, "--trace", str(trace), "--trace-speed", "2", "--output", str(tmp_path / "run"), "--quiet"]
    assert main(words) == 0
    (stage,) = json.loads((tmp_path / "run.json").read_text())["stages"]
    rows = [dict(zip(stage["requests"]["columns"], row, strict=True)) for row in stage["requests"]["rows"]]
    assert [row["intended"] for row in rows] == pytest.approx([0.02 * i for i in range(8)])
    assert [row["output_tokens"] for row in rows] == [3 + i for i in range(8)]
    assert max(row["cached_tokens"] for row in rows) > 256  # the block that all of them share


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rate", "1", "--concurrency", "1"], "give one load, not several: --concurrency, --rate"),
        (["--ramp-to", "5"], "--ramp-to has no effect without --rate"),
        (["--rate", "1,2", "--ramp-to", "5", "--duration", "3"], "--ramp-to goes with one --rate"),
        (["--rate", "1", "--arrivals", "burst"], "--arrivals burst needs --burst-size"),
        (["--rate", "1", "--burst-size", "3"], "--burst-size needs --arrivals burst"),
        (["--trace-speed", "2"], "--trace-speed has no effect without --trace"),
        (["--trace", "x", "--dataset", "builtin"], "--dataset has no effect"),
        (["--trace", "/nowhere/x"], "/nowhere/x cannot be read"),
        (["--dataset", "builtin", "--input-tokens", "5"], "--input-tokens has no effect without --dataset synthetic"),
        (["--input-tokens", "5", "--tasks", "chat"], "--tasks has no effect without --dataset builtin"),
        (["--input-tokens", "many"], "input_tokens must be like 128"),
        (["--multi-turn"], "--multi-turn is for files"),
        (["--num-prefixes", "2"], "--num-prefixes"),
        (["--slo", "fast"], "slo must be like"),
        (["--format", "pdf"], "--format must be some of json, html, csv, not pdf"),
        (["--format", "csv", "--save-text"], "--save-text has no effect without --format json"),
        (["--output", "/proc/nothing/run"], "cannot be written"),
        (["--header", "nonsense"], "--header must be NAME:VALUE"),
        (["--temperature", "warm"], '--temperature must be a number or "default"'),
        (["--warmup", "-1"], "warmup must be a number of at least 0"),
        (["--no-scrape", "--metrics-path", "/m"], "--metrics-path has no effect with --no-scrape"),
        (["--duration", "0"], "duration must be a number of seconds above 0"),
    ],
)
def test_what_cannot_work_is_one_clear_line(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "http://127.0.0.1:9", *words]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("sol: error: ")
    assert says in line
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_keeps_what_was_measured(url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sol", "bench", url, "--rate", "80", "--duration", "600", "--tasks", "chat"]
    command += ["--output", str(tmp_path / "run"), "--output-tokens", "5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            # The first line of progress says that the load runs.
            line = process.stderr.readline()
            assert "80/s, poisson" in line, line + process.stderr.read()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["interrupted"] is True
    assert len(document["stages"][0]["requests"]["rows"]) > 30
    assert (tmp_path / "run.html").exists()


def test_progress_in_one_line() -> None:
    tally = Tally(num_finished=1200, num_in_flight=7, num_tokens=50_000, num_errors=2, longest_lag=0.12)
    assert describe("5/s", tally, 3000, 10.0) == (
        "5/s: 10 s, 1,200 of 3,000 requests done, 7 in flight, 5,000 tokens/s, 2 errors, client's longest stall 120 ms"
    )


def test_plots_keep_peaks_and_escape_names() -> None:
    y = [1.0] * 100_000
    y[54_321] = 50.0
    drawn = plot("a < b", "x", "y", [Series("<s>", list(range(100_000)), y), Series("dots", [0.0], [2.0], points=True)])
    assert "a &lt; b" in drawn
    assert "&lt;s&gt;" in drawn
    assert len(drawn) < 60_000
    heights = [float(pair.split(",")[1]) for pair in re.findall(r"[\d.]+,[\d.]+", drawn)]
    assert min(heights) < 50 < max(heights)
    assert plot("nothing", "x", "y", [Series("s", [], [])]) == ""
    assert plot("one point", "x", "y", [Series("s", [3.0], [3.0])], log_x=True).startswith("<svg")
    assert plot("no finite point", "x", "y", [Series("s", [1.0], [float("inf")])]) == ""


def test_the_process_that_measures_has_no_torch() -> None:
    program = (
        "import sys, sol.bench, sol.bench.report, sol.bench.result, sol.bench.options, sol.cli.bench\n"
        "assert not {'torch', 'transformers', 'tokenizers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_flag_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "measure.md").read_text()
    section = page.split("## How fast a server is")[1].split("\n## ")[0]
    parser = build_parser()
    commands = next(action for action in parser._actions if hasattr(action, "choices") and action.choices)
    assert commands.choices is not None
    flags = {
        flag
        for action in commands.choices["bench"]._actions
        for flag in action.option_strings
        if flag.startswith("--") and flag != "--help"
    }
    mentioned = set(re.findall(r"`(--[a-z-]+)`", section))
    assert mentioned <= flags
    assert {flag for flag in flags - mentioned if not flag.startswith("--no-")} == set()


def test_plots_name_a_series_once_and_leave_room_for_what_lies_on_the_edge() -> None:
    band = [Series("interval", [1.0, 2.0], [level, level]) for level in (-55.0, -45.0)]
    dots = Series("blocks", [1.0, 2.0], [-80.0, -50.0], points=True)
    drawn = plot("by block", "block", "%", [dots, *band])
    assert drawn.count("● interval") == 1
    assert drawn.count('<polyline class="c1"') == 2
    heights = [float(place) for place in re.findall(r'<circle class="c0 dot" cx="[\d.]+" cy="([\d.]+)"', drawn)]
    assert len(heights) == 2
    assert max(heights) < 254 - 2  # a dot's radius above the lower edge
    narrow = plot("less than a decade", "ms", "%", [Series("s", [21.0, 48.0], [0.0, 100.0])], log_x=True)
    assert re.findall(r'text-anchor="middle">(\d+)<', narrow) == ["25", "30", "35", "40", "45"]
