"""Which kernels a configuration gets, and what is said where it cannot have them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_cpu import cpu_executor, native, open_model, packed_program
from tiny_models import TinyLlama

from sol.config import EngineConfig
from sol.errors import ConfigError
from sol.ops.cpu import native as abi
from sol.ops.cpu.native import Isa, KVDType, NativeUnavailableError
from sol.runner import cpu_kernels
from sol.runner.cpu_kernels import check_kv_cache_dtype, choose_kernels, pinned_cores, unavailable

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def no_library() -> Any:
    raise NativeUnavailableError("the CPU kernels were not built: install g++")


def test_auto_takes_the_best_set_and_a_name_that_set() -> None:
    library = native()
    chosen = choose_kernels(EngineConfig(), CPU, quantized=False)
    assert chosen is not None
    assert (chosen.isa, chosen.kv_dtype) == (library.best_isa(), KVDType.FLOAT32)
    chosen = choose_kernels(EngineConfig(), CPU, quantized=True)
    assert chosen is not None
    assert chosen.kv_dtype == KVDType.FLOAT16
    portable = choose_kernels(EngineConfig(cpu_kernels="portable", kv_cache_dtype="int8"), CPU, quantized=False)
    assert portable is not None
    assert (portable.isa, portable.kv_dtype) == (Isa.PORTABLE, KVDType.INT8)
    assert choose_kernels(EngineConfig(cpu_kernels="torch"), CPU, quantized=False) is None
    assert choose_kernels(EngineConfig(), GPU, quantized=False) is None


def test_a_set_that_this_processor_lacks_is_an_error_that_names_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(native()), "isas", lambda self: [Isa.PORTABLE, Isa.AVX2])
    with pytest.raises(ConfigError, match=r"cpu_kernels is avx512, but .* have avx2, portable: choose") as caught:
        choose_kernels(EngineConfig(cpu_kernels="avx512"), CPU, quantized=False)
    assert caught.value.param == "cpu_kernels"


def test_without_a_library_torch_computes_unless_kernels_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "load", no_library)
    assert choose_kernels(EngineConfig(), CPU, quantized=False) is None
    assert unavailable(EngineConfig(), CPU) == "the CPU kernels were not built: install g++"
    with pytest.raises(ConfigError, match="cpu_kernels is avx2, but the CPU kernels were not built"):
        choose_kernels(EngineConfig(cpu_kernels="avx2"), CPU, quantized=False)


def test_options_that_a_backend_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="cpu_kernels is avx2, but the device is cuda") as caught:
        choose_kernels(EngineConfig(cpu_kernels="avx2"), GPU, quantized=False)
    assert caught.value.param == "cpu_kernels"
    check_kv_cache_dtype(EngineConfig(kv_cache_dtype="float16"), torch.float16)
    check_kv_cache_dtype(EngineConfig(), torch.bfloat16)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is int8, but .* the model's dtype, float32") as caught:
        check_kv_cache_dtype(EngineConfig(kv_cache_dtype="int8"), torch.float32)
    assert caught.value.param == "kv_cache_dtype"


def test_threads_are_pinned_only_where_there_is_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 2, 9})
    assert pinned_cores(3) == [2, 5, 9]
    assert pinned_cores(2) is None
    assert pinned_cores(4) is None


def test_the_planned_workspace_holds_what_a_step_takes(tiny_llama: Callable[..., TinyLlama]) -> None:
    config, checkpoint = open_model(tiny_llama(hidden_size=256, intermediate_size=512).directory)
    with cpu_executor(packed_program(config, checkpoint), max_num_tokens=512, num_threads=2) as executor:
        planned = cpu_kernels.workspace_bytes(config, 512, 128)
        logits = 4 * 128 * config.vocab_size
        assert executor.workspace_nbytes + logits <= 1.5 * planned
