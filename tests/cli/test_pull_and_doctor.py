"""`sol pull` and `sol doctor`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sol.cli import diagnosis, main
from sol.cli.machine import Machine, inspect_machine
from sol.cli.units import size
from sol.models.source import ModelFiles
from sol.version import __version__


def test_pull_says_where_the_files_are(smollm2: ModelFiles, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull"]) == 0
    assert capsys.readouterr().out == f"  93.8 MiB  {smollm2.gguf}\n"


def test_pull_lists_weights_and_what_belongs_to_them(talking_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", str(talking_llama)]) == 0
    listed = [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()]
    assert listed[0] == str(talking_llama / "model.safetensors")
    assert {Path(path).name for path in listed[1:]} == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip


def test_doctor_on_a_model_that_fits(talking_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(talking_llama), "--max-num-seqs", "3", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert inspect_machine().cpu in out
    assert "cpu, bfloat16, " in out
    assert "up to 3 requests and 512 tokens" in out
    assert "3.0 requests of the full 512" in out
    assert "No problems found." in out


def test_doctor_says_how_a_model_is_quantised(talking_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", str(talking_llama)])
    assert re.search(r"quantised +no\n", capsys.readouterr().out)
    main(["doctor", str(talking_llama), "--quantization", "int8"])
    assert re.search(r"quantised +int8\n", capsys.readouterr().out)
    assert main(["doctor", str(talking_llama), "--quantization", "awq"]) == 1
    assert "quantization is 'awq', but" in capsys.readouterr().out


def test_doctor_as_json(talking_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(talking_llama), "--json", "--max-model-len", "128"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sol"] == __version__
    assert report["problems"] == []
    assert report["settings"]["max_model_len"] == 128
    assert report["settings"]["kv_cache"] == report["settings"]["kv_cache_tokens"] * 2 * 2 * 2 * 16 * 4
    parameters = 49152 * 64 * 2 + 64 + 2 * (2 * 64 + 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96)
    assert report["model"]["parameters"] == parameters
    assert report["model"]["weight_bytes"]["float32"] == 4 * parameters
    assert report["packages"]["torch"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "drafts by suffix, up to 16 for a request in a step"),
        (
            ("--speculative-config", '{"method": "suffix+ngram", "num_speculative_tokens": 3}'),
            "ngram and suffix, up to 3",
        ),
        (("--speculation", "off"), "off"),
    ],
)
def test_doctor_says_who_drafts(
    talking_llama: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(["doctor", str(talking_llama), *words]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  speculation")]
    assert said in line


def test_doctor_names_a_model_that_does_not_fit(talking_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(talking_llama), "--max-model-len", "512", "--kv-cache-memory-bytes", "64K"]) == 1
    out = capsys.readouterr().out
    assert "million parameters" in out, "what the model costs is said all the same"
    assert "Problem: " in out
    assert "What Sol will use" not in out


def test_doctor_says_when_the_length_was_cut_to_what_fits(
    talking_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(talking_llama), "--kv-cache-memory-bytes", "64K"]) == 0
    assert "128 tokens: 1.0 requests of the full 128 (cut from 512 to what fits)" in capsys.readouterr().out


def test_doctor_names_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "./nowhere"]) == 1
    out = capsys.readouterr().out
    assert "Problem: model './nowhere': there is no such file or directory" in out
    assert "This machine" in out


def machine(**changes: object) -> Machine:
    values = {
        "os": "Linux", "cpu": "some CPU", "instruction_sets": ("avx2",), "cores": 2, "usable_cores": 2.0,
        "memory_bytes": 2**34, "available_bytes": 2**33, "memory_limit_bytes": 2**32, "nvidia_driver": None,
    }  # fmt: skip
    return Machine(**(values | changes))  # type: ignore[arg-type]


def test_doctor_names_what_is_wrong_with_the_machine(
    talking_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(
        diagnosis, "inspect_machine", lambda: machine(instruction_sets=("sse2",), nvidia_driver="570.86.15")
    )
    monkeypatch.setattr(diagnosis, "package_versions", lambda: {"torch": "2.13.0", "rich": None, "pyzmq": None})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["doctor", str(talking_llama)]) == 1
    out = capsys.readouterr().out
    assert 'not installed: pyzmq, rich\n  Remedy: pip install "sol-inference[serve]"' in out
    assert "no AVX2" in out
    assert "the NVIDIA driver 570.86.15 is there, but torch" in out
    assert "limited to 4.00 GiB by the cgroup" in out


def test_doctor_without_a_torch_that_works(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(diagnosis, "_gpus", fail)
    assert main(["doctor"]) == 1
    assert "cannot be imported: libcudart.so.13" in capsys.readouterr().out


def test_doctor_lists_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], talking_llama: Path
) -> None:
    gpu = diagnosis.Gpu(name="NVIDIA H200", memory_bytes=141 * 2**30, compute_capability="9.0")
    monkeypatch.setattr(diagnosis, "_gpus", lambda: [gpu])
    assert main(["doctor", str(talking_llama), "--device", "cpu"]) == 0
    assert "NVIDIA H200, 141.00 GiB, compute capability 9.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (98362432, "93.8 MiB"), (3 * 2**30, "3.00 GiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text
