"""`sol verify` as a user runs it; what it finds is tested in tests/speculation/test_verification.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sol import verification
from sol.cli import main
from sol.verification.report import Cell, Difference, Law, Report, Speed


def test_a_model_through_engines_of_their_own(
    talking_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two one two one two one two"}\n')
    words = ["verify", str(talking_llama), "--quick", "--prompts", str(prompts), "--no-enable-prefix-caching", "--json"]
    words += ["--max-model-len", "64", "--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}']
    code = main(words)
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["num_errors"] == report["num_near_ties"] == 0
    assert report["drafters"] == ["ngram"]
    assert {cell["drafter"] for cell in report["cells"]} == {"ngram", "none", "as configured"}
    assert report["law"]["holds"] is True
    assert report["speeds"][0]["prompt"] == "line 1"
    # A random model may say nothing that can be looked up: then nothing is verified, and that is said.
    drafted = sum(cell["num_draft_tokens"] for cell in report["cells"])
    assert code == (0 if drafted else 1)
    assert report["holds"] is (drafted > 0)
    assert re.search(r"^Verifying: without a prefix cache: 6 of 6$", err, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--speculation", "off"], "speculation is off: there is nothing to compare"),
        (["--tolerance", "-1"], "--tolerance must be a number of at least 0, not -1.0"),
        (["--tolerance", "nan"], "--tolerance must be a number of at least 0"),
        (["--prompts", "/nowhere/prompts.txt"], "--prompts /nowhere/prompts.txt cannot be read"),
        (["--speculative-config", '{"method": "guess"}'], "speculative_config.method must be"),
    ],
)
def test_what_cannot_work_is_one_clear_line(
    talking_llama: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(talking_llama), *words]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("sol: error: ")
    assert says in line


@pytest.fixture
def found(talking_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """A report that the command is going to print."""
    report = Report(
        model="tiny", device="cuda", dtype="bfloat16", drafters=["suffix"], verify_method="coupled",
        controller="goodput", num_speculative_tokens=16, tolerance=0.3, quick=False, seconds=12.3,
    )  # fmt: skip
    common = {"prefix_cache": True, "company": "alone", "drafter": "suffix", "num_requests": 4, "num_tokens": 1280}
    report.cells = [
        Cell(sampling="greedy", num_draft_tokens=900, num_accepted_tokens=700, **common),  # type: ignore[arg-type]
        Cell(sampling="seeded", num_draft_tokens=90, num_accepted_tokens=7, **common),  # type: ignore[arg-type]
    ]
    report.law = Law(verify_method="coupled", num_tokens=4, top_k=3, temperature=2.0, num_samples=4000, num_cells=30,
                     p_value=0.25, significance=1e-6, distance=0.01, distance_bound=0.07)  # fmt: skip
    report.speeds = [
        Speed(prompt="copy", plain_tokens_per_second=50.0, tokens_per_second=100.0, num_steps=40, num_drafts=20,
              num_draft_tokens=80, num_accepted_tokens=60)
    ]  # fmt: skip

    def run_checks(*_: object) -> Report:
        report.conclude()
        return report

    monkeypatch.setattr(verification, "run_checks", run_checks)
    return report


def test_a_verdict_for_people(talking_llama: Path, found: Report, capsys: pytest.CaptureFixture[str]) -> None:
    tie = Difference(
        prompt="chat", cell=found.cells[1].name, position=17, expected=5, found=9, gap=-0.02, near_tie=True
    )
    found.cells[1].differences.append(tie)
    assert main(["verify", str(talking_llama)]) == 0
    out = capsys.readouterr().out
    assert "tiny (cuda, bfloat16)" in out
    assert re.search(r"equal +suffix, greedy, prefix cache, alone: 4 answers, 1,280 tokens, 700 of 900 drafts", out)
    assert re.search(r"near ties +suffix, seeded, .*, 1 differ, 7 of 90 drafts accepted", out)
    assert "chat, token 17: 9 in place of 5, -0.02 apart" in out
    assert "p = 0.25 over 30 sequences" in out
    assert (
        "2.00 times plain: 100.0 instead of 50.0 tokens/s; 60 of 80 drafts accepted, mean acceptance length 4.00" in out
    )
    assert out.endswith("Speculation changes nothing: 2,560 tokens compared, 0 errors, 1 near tie, in 12 s.\n")


def test_a_verdict_against_it(talking_llama: Path, found: Report, capsys: pytest.CaptureFixture[str]) -> None:
    error = Difference(prompt="copy", cell=found.cells[0].name, position=3, expected=5, found=None)
    found.cells[0].differences.append(error)
    assert found.law is not None
    found.law.p_value, found.law.plain_p_value, found.law.same_p_value = 1e-9, 0.5, 1e-8
    assert main(["verify", str(talking_llama)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"ERROR +suffix, greedy, prefix cache, alone: copy, token 3: the end in place of 5", out)
    assert "Plain decoding has p = 0.5; both against each other p = 1e-08." in out
    assert "Problem: of 8 answers 1 differ from plain decoding's, and not by a near tie" in out
    assert "Problem: sampled tokens do not follow the model's probabilities" in out
    assert "Not verified: 2,560 tokens compared, 1 error, in 12 s." in out
    found.problems = []
    assert main(["verify", str(talking_llama), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["holds"] is False
    assert report["cells"][0]["differences"][0]["found"] is None


def test_every_dtype_has_a_tolerance() -> None:
    from sol.runner.device import DTYPES
    from sol.verification.checks import TOLERANCES

    assert set(TOLERANCES) == set(DTYPES)
