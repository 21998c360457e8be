"""`sol tune` as a user runs it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sol.cli import build_parser, main
from sol.cli.simulate import chosen_config

SIMULATED = [
    "tune", "--simulate", "h100-8b", "--slo", "ttft_p90<500ms,tpot_p90<25ms", "--num-requests", "24",
    "--input-tokens", "200", "--output-tokens", "8", "--vary", "max_num_seqs=4,16,64", "--vary", "block_size=16",
    "--vary", "max_num_batched_tokens=256,2048", "--vary", "enable_prefix_caching=true",
]  # fmt: skip


def test_a_simulated_server_is_tuned_and_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ["--output", str(tmp_path / "found")]
    assert main([*SIMULATED, *output, "--trials", "4"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^[\d.e+]+ good requests/s at the SLO", out)
    assert err.count("\n[") + err.startswith("[") == 4
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["num_started"] == 4
    best = next(trial for trial in document["trials"] if trial["number"] == document["best"])
    words = ["simulate", "--config", str(tmp_path / "found.yaml")]
    assert out.rstrip().endswith("sol simulate --config " + words[-1])
    laws = chosen_config(build_parser().parse_args(words)).laws
    assert {name: getattr(laws, name) for name in best["config"]} == best["config"]
    assert (tmp_path / "found.html").read_text().startswith("<!doctype html>")
    assert main([*SIMULATED, *output, "--trials", "4"]) == 2
    assert "go on with it (--resume)" in capsys.readouterr().err
    assert main([*SIMULATED, *output, "--trials", "6", "--resume", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    more = json.loads((tmp_path / "found.json").read_text())
    assert more["num_started"] == 6
    assert more["trials"][:4] == document["trials"]


def test_nothing_that_meets_the_slo_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SIMULATED, "--output", str(tmp_path / "none"), "--trials", "2"]
    words[words.index("--slo") + 1] = "ttft_p90<1ms"
    assert main(words) == 1
    assert "No configuration met the SLO" in capsys.readouterr().out
    assert not (tmp_path / "none.yaml").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model"], "MODEL has no effect with --simulate"),
        (["--engine", "vllm"], "--engine has no effect with --simulate"),
        (["--dataset", "builtin"], "--dataset has no effect with --simulate"),
        (["--kl-bound", "1"], "--kl-bound has no effect with --simulate"),
        (["--num-prefixes", "2"], "--num-prefixes needs --prefix-tokens"),
        (["--vary", "speculation=off"], "'speculation' is none of max_num_seqs"),
        (["--vary", "num_speculative_tokens=-1"], "num_speculative_tokens must be 0 to 1024"),
        (["--num-requests", "5"], "num_requests must be at least 20"),
        (["--trials", "0"], "trials must be at least 1"),
        (["--time-limit", "0"], "time_limit must be more than 0 seconds"),
        (["--price-per-hour", "0"], "price_per_hour must be a number above 0"),
        (["--resume"], "to go on with"),
    ],
)
def test_what_cannot_work_is_said_first(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SIMULATED, "--output", str(tmp_path / "x"), *words]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


def test_a_file_of_laws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    laws = tmp_path / "laws.yaml"
    laws.write_text("profile: cpu-small\nstep_seconds: 0.03\n")
    words = [*SIMULATED, "--output", str(tmp_path / "found"), "--trials", "1"]
    words[words.index("--simulate") + 1] = str(laws)
    words[words.index("--slo") + 1] = "e2e_p90<20s"
    assert main(words) == 0
    assert json.loads((tmp_path / "found.json").read_text())["what"]["simulate"]["step_seconds"] == 0.03
    words[words.index("--simulate") + 1] = "h200"
    assert main(words) == 2
    assert "simulate must be one of" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured_and_leaves_no_server(talking_llama: Path, tmp_path: Path) -> None:
    model = tmp_path / "a_path_of_its_own"  # by which this test's servers are known from those of others
    model.symlink_to(talking_llama)
    words = [
        "tune", str(model), "--slo", "ttft_p50<5s", "--trials", "3", "--num-requests", "8",
        "--tolerance", "0.5", "--engine-args", "--device cpu --max-model-len 512", "--input-tokens", "32",
        "--output-tokens", "8",
        "--vary", "max_num_seqs=2,4", "--vary", "max_num_batched_tokens=64", "--vary", "block_size=16",
        "--vary", "speculation=off", "--vary", "quantization=none", "--vary", "kv_cache_dtype=auto",
        "--vary", "enable_prefix_caching=true", "--output", str(tmp_path / "found"),
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "sol", *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "/s: m" in line:  # a rate that meets the SLO, or misses it
            assert len(processes_of(model)) > 1  # the command and the server
            process.send_signal(signal.SIGINT)
            break
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130, (out, lines)
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["interrupted"]
    (trial,) = document["trials"]
    assert trial["outcome"] == "interrupted"
    alone, loaded = trial["probes"]
    assert alone["rate"] == 0 < alone["mean_e2e"]
    assert loaded["rate"] > 0 < loaded["num_requests"]
    assert not (tmp_path / "found.yaml").exists()
    # The server went with it.
    assert processes_of(model) == []


def processes_of(model: Path) -> list[str]:
    """Who has this path on its command line."""
    return subprocess.run(["pgrep", "-f", str(model)], capture_output=True, text=True, check=False).stdout.split()
