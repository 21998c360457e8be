"""The memory plan, from invented machines."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from sol.config import EngineConfig
from sol.errors import OutOfMemoryError
from sol.models.config import ModelConfig
from sol.ops.reference import GATHER_TOKENS
from sol.runner.cgroup import CGroups
from sol.runner.memory import (
    GIB,
    DeviceMemory,
    MemoryPlan,
    allocate_kv_cache,
    device_memory,
    kv_bytes_per_token,
    plan_memory,
    workspace_bytes,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    torch_dtype="float32",
    bos_token_id=1,
    eos_token_ids=(2,),
)
WEIGHTS = 538_060_032
PER_TOKEN = 2 * 30 * 3 * 64 * 4


def make_plan(
    total: float, available: float | None = None, *, device: torch.device = CPU, weights: int = WEIGHTS, **options: Any
) -> MemoryPlan:
    memory = DeviceMemory(total=int(total * GIB), available=int((total if available is None else available) * GIB))
    return plan_memory(
        EngineConfig(**options),
        SMOLLM2,
        device,
        memory=memory,
        weights=weights,
        workspace=workspace_bytes(SMOLLM2, torch.float32, 512, 128),
        kv_per_token=kv_bytes_per_token(SMOLLM2, torch.float32),
        max_num_seqs=128,
    )


def test_two_servers_fit_one_machine_of_8_gib() -> None:
    first = make_plan(8)
    used = (first.weights + first.workspace + first.kv_cache) / GIB
    second = make_plan(8, available=8 - used)
    both = used + (second.weights + second.workspace + second.kv_cache) / GIB
    assert both < 7.5
    assert second.max_model_len == 8192
    assert second.full_length_requests >= 2


def test_a_cpu_stays_modest_unless_it_is_asked_for_more() -> None:
    assert make_plan(256).kv_cache <= 2 * GIB
    assert make_plan(256, gpu_memory_utilization=0.5).kv_cache > 40 * GIB
    assert make_plan(256, kv_cache_memory_bytes=3 * GIB).kv_cache == pytest.approx(3 * GIB, rel=0.01)


def test_a_gpu_gets_what_weights_and_workspace_leave() -> None:
    plan = make_plan(80, device=GPU, weights=16 * GIB)
    assert plan.weights + plan.workspace + plan.kv_cache <= 0.9 * 80 * GIB
    assert plan.num_blocks == 128 * 512  # no more than max_num_seqs requests of full length can use


def test_a_length_nobody_asked_for_shrinks_and_one_asked_for_is_an_error() -> None:
    small = 300 * (1 << 20)
    plan = make_plan(8, kv_cache_memory_bytes=small)
    assert plan.max_model_len == plan.kv_tokens == small // PER_TOKEN // 16 * 16
    with pytest.raises(OutOfMemoryError, match=f"at most {plan.max_model_len}") as caught:
        make_plan(8, kv_cache_memory_bytes=small, max_model_len=8192)
    assert caught.value.param == "max_model_len"
    assert make_plan(8, kv_cache_memory_bytes=small, max_model_len=100).max_model_len == 100


def test_what_does_not_fit_is_said_with_a_remedy() -> None:
    with pytest.raises(OutOfMemoryError, match=r"the weights need .* GiB") as caught:
        make_plan(8, weights=5 * GIB)
    assert caught.value.param == "gpu_memory_utilization"
    with pytest.raises(OutOfMemoryError, match=r"kv_cache_memory_bytes is 9\.00 GiB"):
        make_plan(8, kv_cache_memory_bytes=9 * GIB)
    for length in (None, 100):
        with pytest.raises(OutOfMemoryError, match=r"block of 16 tokens needs 720\.0 KiB") as caught:
            make_plan(8, kv_cache_memory_bytes=1000, max_model_len=length)
        assert caught.value.param == "kv_cache_memory_bytes"
    assert make_plan(8, kv_cache_memory_bytes=16 * PER_TOKEN).max_model_len == 16


def test_the_remedy_is_the_option_that_decided() -> None:
    with pytest.raises(OutOfMemoryError, match=r"or raise --gpu-memory-utilization$"):
        make_plan(8, gpu_memory_utilization=0.1, max_model_len=8192)
    with pytest.raises(OutOfMemoryError, match=r"or raise --kv-cache-memory-bytes$"):
        make_plan(8, kv_cache_memory_bytes=64 << 20, max_model_len=8192)


def test_a_machine_of_1_gib_is_told_what_to_lower() -> None:
    with pytest.raises(OutOfMemoryError, match=r"the plan has 409\.6 MiB.*lower --max-num-seqs"):
        make_plan(1)
    with pytest.raises(OutOfMemoryError, match=r"the plan has 0\.0 KiB"):
        make_plan(1, available=0.25)


def test_free_memory_bounds_the_plan_whatever_the_share() -> None:
    plan = make_plan(64, available=2.0, gpu_memory_utilization=1.0)
    assert plan.weights + plan.workspace + plan.kv_cache <= 1.5 * GIB


def test_the_workspace_has_room_for_what_attention_gathers() -> None:
    gathered = GATHER_TOKENS * PER_TOKEN // SMOLLM2.num_hidden_layers
    least = workspace_bytes(SMOLLM2, torch.float32, 1, 1)
    assert gathered < least < 1.1 * gathered


def test_the_cache_has_the_planned_shape() -> None:
    plan = make_plan(8, kv_cache_memory_bytes=100 * PER_TOKEN)
    cache = allocate_kv_cache(plan, SMOLLM2, torch.float32, CPU)
    assert cache.shape == (30, 2, 6, 16, 3, 64)
    assert cache.nbytes == plan.kv_cache


def test_a_cache_that_cannot_be_reserved_is_said() -> None:
    plan = dataclasses.replace(make_plan(8), num_blocks=1 << 40)
    with pytest.raises(OutOfMemoryError, match="could not be reserved: lower --gpu-memory-utilization"):
        allocate_kv_cache(plan, SMOLLM2, torch.float32, CPU)


def test_this_machine_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = device_memory(CPU)
    assert 0 < memory.available <= memory.total
    monkeypatch.setattr(CGroups, "memory", lambda self: (9 << 20, 1 << 20))
    assert device_memory(CPU) == DeviceMemory(total=9 << 20, available=1 << 20)
    monkeypatch.setattr(CGroups, "memory", lambda self: (1 << 60, 1 << 60))
    assert device_memory(CPU).total == memory.total
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 80))
    assert device_memory(GPU) == DeviceMemory(total=80, available=30)


def test_cgroups(tmp_path: Path) -> None:
    root, inner = tmp_path / "cgroup", tmp_path / "cgroup" / "service" / "worker"
    inner.mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("0::/service/worker\n")
    groups = CGroups(root, membership)
    assert groups.memory() is None
    assert groups.cores() is None

    (inner / "memory.max").write_text("max\n")
    (inner / "cpu.max").write_text("max 100000\n")
    service = root / "service"
    (service / "memory.max").write_text("1000\n")
    (service / "memory.current").write_text("700\n")
    (service / "memory.stat").write_text("anon 400\nactive_file 100\ninactive_file 200\n")
    (service / "cpu.max").write_text("150000 100000\n")
    (root / "cpu.max").write_text("400000 100000\n")
    assert groups.memory() == (1000, 600)
    assert groups.cores() == 1.5
    assert CGroups(tmp_path / "none", tmp_path / "nothing").memory() is None
