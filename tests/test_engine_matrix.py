"""benchmarks/engine_matrix.py runs on Sol: the same program, with smaller numbers than an eight-billion model's."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

SMALLER = {
    "{128: (1, 2, 4, 8, 16, 32, 64, 128, 256), 2048: (1, 8, 32)}": "{8: (1, 3), 40: (2,)}",
    "for prompt_len in (2048, 8000)": "for prompt_len in (20, 90)",
    "512 * 256 / run(512, 512, 256)": "6 * 4 / run(6, 10, 4)",
    "rng.randrange(1000, 120000)": "rng.randrange(10, 1200)",
    "max_num_seqs=512": "max_num_seqs=8",
    "129": "5",
}


def test_the_program_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    source = (BENCHMARKS / "engine_matrix.py").read_text()
    for large, small in SMALLER.items():
        assert large in source, f"{large} is no longer in engine_matrix.py"
        source = source.replace(large, small)
    program = tmp_path / "engine_matrix.py"
    program.write_text(source)
    shutil.copytree(BENCHMARKS / "llama-3-8b", tmp_path / "llama-3-8b")
    config = tmp_path / "llama-3-8b" / "config.json"
    shape = {
        "vocab_size": 1280, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    config.write_text(json.dumps(json.loads(config.read_text()) | shape | {"bos_token_id": 1, "eos_token_id": 2}))

    monkeypatch.setattr(sys, "argv", ["engine_matrix.py", "--engine", "sol"])
    namespace = {"__name__": "engine_matrix", "__file__": str(program)}
    exec(compile(source, str(program), "exec"), namespace)
    namespace["main"]()  # type: ignore[operator]

    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert rows["engine"] == "sol"
    expected = [
        "itl_ms[in=8,batch=1]",
        "itl_ms[in=8,batch=3]",
        "itl_ms[in=40,batch=2]",
        "prefill_ms[20]",
        "prefill_ms[90]",
    ]
    assert [name for name in rows if name.endswith("]")][:5] == expected
    assert rows["prefill_ms[90]"] > 0
