"""Which device and dtype are chosen, and how wrong wishes are refused."""

from __future__ import annotations

import os

import pytest
import torch

from sol.errors import ConfigError
from sol.runner.device import device_name, num_threads, resolve_device, resolve_dtype, usable_cores

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_without_a_gpu_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, match="finds no GPU") as caught:
        resolve_device("cuda")
    assert caught.value.param == "device"


def test_a_gpu_is_taken_if_it_is_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert resolve_device("auto") == resolve_device("cuda") == GPU
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    with pytest.raises(ConfigError, match=r"Tesla T4 has compute capability 7\.5"):
        resolve_device("auto")


def test_dtype() -> None:
    assert resolve_dtype("auto", CPU, "bfloat16") == torch.float32
    assert resolve_dtype("auto", GPU, "bfloat16") == torch.bfloat16
    assert resolve_dtype("float16", CPU, "float32") == torch.float16


def test_threads_are_the_cores_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)  # torch reads the variable when it is imported
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    assert num_threads() == 77
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert num_threads() == usable_cores()


def test_this_machine() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
    assert device_name(CPU)
