"""`sol compare` as a user runs it."""

from __future__ import annotations

import dataclasses
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

from sol.cli import build_parser, main
from sol.compare import Answer, Block, Pair, Plan, Round, judge
from sol.compare.likelihoods import Likelihoods
from sol.compare.session import Outcome
from sol.compare.sides import parse_side, started
from sol.compare.texts import Equivalence
from sol.simulate import profile
from sol.simulate.config import SimulateConfig
from sol.simulate.laws import TextLaws
from sol.simulate.server import in_thread

SMALL = ["--blocks", "6", "--prompts", "2", "--concurrency", "2", "--output-tokens", "8", "--tasks", "chat", "--quiet"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    laws = profile("fast", num_speculative_tokens=4, acceptance_rate=0.9, step_seconds=0.006)
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
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_two_servers_of_different_laws_are_started_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = "sol simulate --profile fast --step-seconds"
    words = ["compare", "--a", f"{step} 0.004", "--b", f"{step} 0.02", *SMALL, "--output", str(tmp_path / "run")]
    assert main([*words, "--server-logs", str(tmp_path / "log"), "--api-key", "s3cret", "--save-text"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^B is worse: E2E \d+(\.\d+)?% higher \(.*\)\. Texts: the same \(24 of 24\)\.$", out, re.M)
    text = (tmp_path / "run.json").read_text()
    document = json.loads(text)
    assert document["format"] == "sol-compare/1"
    assert (document["verdict"], document["texts_verdict"], document["exit_code"]) == ("worse", "same", 1)
    effect = document["effects"]["e2e"]
    assert 1.0 < effect["low"] < effect["ratio"] < effect["high"]
    assert effect["ratio"] > 1.5
    assert document["effects"]["throughput"]["ratio"] < 0.8
    assert document["sides"]["b"]["command"] == f"{step} 0.02"
    # ABBA: the same prompts in each pair, others in the next, and B first in half of them.
    asked: list[list[int]] = []
    for block in document["blocks"]:
        assert [pair["order"] for pair in block["pairs"]] == ["AB", "BA"]
        for pair in block["pairs"]:
            rows = [[dict(zip(pair[side]["columns"], row, strict=True)) for row in pair[side]["rows"]] for side in "ab"]
            assert [row["place"] for row in rows[0]] == [row["place"] for row in rows[1]]
            assert [row["text"] for row in rows[0]] == [row["text"] for row in rows[1]]
            asked.append([row["place"] for row in rows[0]])
    assert sorted(place for pair in asked for place in pair) == list(range(24))
    assert document["texts"]["own"]["num_compared"] == 16
    assert document["texts"]["own"]["differences"] == []
    page_text = (tmp_path / "run.html").read_text()
    page = Page(page_text)
    assert page.open == []
    assert page.addresses == []
    assert "script" not in page.tags
    assert page.tags.count("svg") >= 5
    assert "s3cret" not in text + page_text
    assert "http" in (tmp_path / "log-a.log").read_text()


def test_reports_name_a_command_without_its_keys() -> None:
    side = parse_side("vllm serve org/model --api-key s3cret --seed 3", "a")
    assert side.shown == "vllm serve org/model --api-key *** --seed 3"
    assert parse_side("VLLM_API_KEY=s3cret HF_HOME=/m vllm serve m", "b").shown == (
        "VLLM_API_KEY=*** HF_HOME=/m vllm serve m"
    )
    assert parse_side("sol simulate --profile fast", "a").shown == "sol simulate --profile fast"


def test_one_server_with_and_without_speculation(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", url, "--a-body", '{"speculation": {"enabled": false}}', *SMALL, "--output-tokens", "20"]
    assert main([*words, "--output", str(tmp_path / "run"), "--format", "json"]) == 0
    out = capsys.readouterr().out
    assert "B is better: E2E" in out
    assert "A and B are one server" in out
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["texts_verdict"] == "same"
    assert document["sides"]["a"]["body"]["speculation"] == {"enabled": False}
    assert "speculation" not in document["sides"]["b"]["body"]
    assert not (tmp_path / "run.html").exists()


def test_a_model_that_means_something_else_is_exit_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    laws = profile("fast", step_seconds=0.002)
    with (
        in_thread(SimulateConfig(laws=laws, port=0, text=TextLaws(near_tie_rate=0.02))) as a,
        in_thread(SimulateConfig(laws=laws, port=0, text=TextLaws(near_tie_rate=0.02, difference_rate=0.05))) as b,
    ):
        words = ["compare", a.url, b.url, *SMALL, "--output-tokens", "40", "--output", str(tmp_path / "run")]
        # Whether B is a little slower on a busy machine is not the question here.
        assert main([*words, "--metric", "throughput", "--self-prompts", "4"]) in (3, 1)
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["texts_verdict"] == "differ"
    kinds = {one["kind"] for one in document["texts"]["differences"]}
    assert "real" in kinds
    assert "Texts: they differ" in capsys.readouterr().out
    assert "Where texts differ" in (tmp_path / "run.html").read_text()


def test_a_wanted_effect_is_announced_and_then_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    laws = [profile("fast", step_seconds=seconds) for seconds in (0.004, 0.012)]
    with in_thread(SimulateConfig(laws=laws[0], port=0)) as a, in_thread(SimulateConfig(laws=laws[1], port=0)) as b:
        words = ["compare", a.url, b.url, *[word for word in SMALL if word != "--quiet"], "--effect", "50%"]
        assert main([*words, "--max-blocks", "8", "--output", str(tmp_path / "run"), "--format", "json"]) == 1
    err = capsys.readouterr().err
    assert re.search(r"6 blocks say that \d+ find a difference of 50%", err)
    assert re.search(r"block 6 of \d: E2E of B / A", err)
    document = json.loads((tmp_path / "run.json").read_text())
    assert len(document["blocks"]) == min(8, document["announced_blocks"])


async def test_a_server_that_ended_meanwhile_is_named() -> None:
    side = parse_side("sol simulate --profile fast", "a")
    async with started([side], log_prefix=None, start_timeout=60, say=lambda _: None) as (running,):
        assert running.farewell("A") is None
        assert running.service is not None
        assert running.service.pid is not None
        os.kill(running.service.pid, signal.SIGKILL)
        await running.service.on_exit
        assert (running.farewell("A") or "").startswith("A ended during the comparison (exit code -9)")


def test_a_baseline_that_died_is_no_success() -> None:
    answers = [Answer(key=str(i), place=i, e2e=1.0) for i in range(8)]
    half = Round(answers=answers, seconds=1.0)
    blocks = [Block(number=0, pairs=[Pair(a=half, b=half, a_first=True)])]
    outcome = Outcome(
        comparison=judge(blocks, Plan()), texts=Equivalence(num_compared=0), likelihoods=Likelihoods(offered=False)
    )
    assert outcome.exit_code == 0
    assert dataclasses.replace(outcome, a_ended=True).exit_code == 2


def test_runs_that_sol_bench_recorded(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, body in (("a", {"speculation": {"enabled": False}}), ("b", {})):
        words = ["bench", url, "--concurrency", "2", "--num-requests", "40", "--output-tokens", "12", "--quiet"]
        words += ["--extra-body", json.dumps(body), "--save-text", "--output", str(tmp_path / name), "--no-scrape"]
        assert main([*words, "--warmup", "0", "--cooldown", "0"]) == 0
    files = [str(tmp_path / f"{name}.json") for name in "ab"]
    assert main(["compare", *files, "--output", str(tmp_path / "run"), "--metric", "tpot"]) == 0
    out = capsys.readouterr().out
    assert "B is better: TPOT" in out
    assert "Texts: the same" in out
    assert "recorded one after the other" in out
    assert json.loads((tmp_path / "run.json").read_text())["sides"]["a"]["tool"] == "sol bench"
    assert main(["compare", *files, "--concurrency", "3"]) == 2
    assert "--concurrency has no effect on recorded runs" in capsys.readouterr().err
    assert main(["compare", files[0], url]) == 2
    assert "one side is a recorded run and the other a server" in capsys.readouterr().err


def test_a_second_server_that_does_not_start_says_who_was_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good, bad = "sol simulate --profile fast", "sol simulate --block-size 0"
    assert main(["compare", "--a", good, "--b", bad, *SMALL]) == 2
    err = capsys.readouterr().err
    assert "B did not start: it ended (exit code 2) before it was ready" in err
    assert re.search(r"A \(.*simulate --profile fast .*\) was running beside it", err)
    assert "block_size" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "there is nothing to compare"),
        (["http://127.0.0.1:9"], "there is no B"),
        (["http://127.0.0.1:9", "--a", "http://127.0.0.1:8"], "A was given twice"),
        (["nowhere.json", "http://127.0.0.1:9"], "a is 'nowhere.json': no address"),
        (["http://127.0.0.1:9", "python -m http.server"], "starts no server whose flags are known"),
        (["http://127.0.0.1:9", "http://127.0.0.1:8"], "cannot be reached"),
        (["http://127.0.0.1:9", "http://127.0.0.1:8", "--blocks", "3"], "blocks must be at least 6"),
        (["http://127.0.0.1:9", "http://127.0.0.1:8", "--rate", "3", "--concurrency", "2"], "not both"),
        (["http://127.0.0.1:9", "http://127.0.0.1:8", "--rate", "0"], "rate must be"),
        (["http://127.0.0.1:9", "http://127.0.0.1:8", "--arrivals", "constant"], "--arrivals has no effect"),
        (["http://127.0.0.1:9", "http://127.0.0.1:8", "--load", "x"], "--load has no effect on servers"),
        (["http://127.0.0.1:9", "http://127.0.0.1:8", "--server-logs", "x"], "--server-logs has no effect"),
        (["http://127.0.0.1:9", "http://127.0.0.1:8", "--near-tie", "-1"], "near_tie must be 0 to 100"),
        (["http://127.0.0.1:9", "http://127.0.0.1:8", "--turns", "2", "--dataset", "builtin"], "--turns has no effect"),
        (["http://127.0.0.1:9", "http://127.0.0.1:8", "--format", "csv"], "--format must be some of json, html"),
        (["http://127.0.0.1:9", "http://127.0.0.1:8", "--temperature", "warm"], "--temperature must be"),
    ],
)
def test_what_cannot_be_compared_is_one_clear_line(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_keeps_the_blocks_so_far_and_leaves_no_server(tmp_path: Path) -> None:
    step = "sol simulate --profile fast --step-seconds"
    command = [sys.executable, "-m", "sol", "compare", "--a", f"{step} 0.002", "--b", f"{step} 0.015"]
    command += [*[word for word in SMALL if word not in ("--quiet", "6", "--blocks")], "--blocks", "1000"]
    command += ["--max-blocks", "1000", "--output", str(tmp_path / "run")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        addresses = []
        try:
            for line in process.stderr:
                addresses += re.findall(r"ready at http://127\.0\.0\.1:(\d+)", line)
                if line.startswith("block 6 of 1000"):
                    process.send_signal(signal.SIGINT)
                    break
            assert process.wait(60) == 130, process.stderr.read()
        finally:
            process.kill()
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["interrupted"] is True
    assert len(document["blocks"]) >= 6
    assert document["verdict"] == "worse"
    assert len(addresses) == 2
    for port in addresses:
        connection = subprocess.run(
            [sys.executable, "-c", f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"],
            capture_output=True, check=False,
        )  # fmt: skip
        assert connection.returncode != 0


def test_the_process_that_compares_has_no_torch() -> None:
    program = (
        "import sys, sol.compare, sol.compare.session, sol.compare.report, sol.compare.recorded, sol.compare.sides\n"
        "import sol.cli.compare\n"
        "assert not {'torch', 'transformers', 'tokenizers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_flag_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "measure.md").read_text()
    section = page.split("## Which of two is faster")[1].split("\n## ")[0]
    parser = build_parser()
    commands = next(action for action in parser._actions if hasattr(action, "choices") and action.choices)
    assert commands.choices is not None
    by_command = {
        name: {flag for action in commands.choices[name]._actions for flag in action.option_strings
               if flag.startswith("--") and flag != "--help"}
        for name in ("compare", "bench", "serve")
    }  # fmt: skip
    mentioned = set(re.findall(r"`(--[a-z-]+)`", section))
    assert mentioned <= by_command["compare"]
    # Flags of the data are those of sol bench, whose section explains them.
    own = by_command["compare"] - by_command["bench"]
    assert {flag for flag in own - mentioned if not flag.startswith("--no-")} == set()
