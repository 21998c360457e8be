"""scripts/install_torch.py: which torch a machine gets, and what it says when it finds none."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "install_torch.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_torch", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_only_cpu_builds_are_tried(script: ModuleType) -> None:
    plan = script.attempts("torch==2.13.0", "", linux=True, gpu=False)
    assert [arguments[-1] for arguments in plan] == ["torch==2.13.0+cpu", "torch==2.13.0+cpu"]
    assert "--index-url" not in plan[0], "pip's own configuration is asked first"
    assert plan[1][plan[1].index("--index-url") + 1] == script.CPU_INDEX


def test_a_gpu_or_another_system_gets_what_was_asked_for(script: ModuleType) -> None:
    assert script.attempts("torch==2.13.0", "", linux=True, gpu=True) == [["torch==2.13.0"]]
    assert script.attempts("torch==2.13.0", "", linux=False, gpu=False) == [["torch==2.13.0"]]


def test_a_named_index_is_the_only_one(script: ModuleType) -> None:
    plan = script.attempts("torch==2.13.0", "https://mirror.example/whl", linux=True, gpu=False)
    assert plan == [["--no-deps", "--index-url", "https://mirror.example/whl", "torch==2.13.0"]]


@pytest.mark.parametrize("requirement", ["torch>=2.11", "torch==2.13.0+cpu", "/wheels/torch.whl"])
def test_any_other_requirement_is_passed_on(script: ModuleType, requirement: str) -> None:
    assert script.attempts(requirement, "", linux=True, gpu=False) == [[requirement]]


def test_a_gpu_is_seen_natively_and_under_wsl(script: ModuleType, tmp_path: Path) -> None:
    assert not script.has_nvidia_gpu(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert not script.has_nvidia_gpu(tmp_path), "the driver's control node alone is no GPU"
    (tmp_path / "dev" / "nvidia0").touch()
    assert script.has_nvidia_gpu(tmp_path)
    wsl = tmp_path / "wsl" / "usr" / "lib" / "wsl" / "lib"
    wsl.mkdir(parents=True)
    (wsl / "libcuda.so.1").touch()
    assert script.has_nvidia_gpu(tmp_path / "wsl")


def test_where_there_is_no_torch_it_says_what_to_do(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    environment |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "torch==0.0.1"], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "TORCH_INDEX=" in done.stderr
