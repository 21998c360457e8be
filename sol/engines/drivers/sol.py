"""Sol's own server: the flags of `sol serve`, which are vLLM's where they mean the same."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Mapping
from typing import ClassVar

from sol.engines.driver import Driver, Words
from sol.engines.drivers.vllm import VLLM_METRICS, speculative_config
from sol.engines.spec import EngineSpec, SpeculationSpec


class Sol(Driver):
    """`gpu_memory_utilization` covers weights, workspace and KV cache; on a CPU, of the machine's memory."""

    name = "sol"
    title = "Sol"
    flags: ClassVar[Mapping[str, str]] = {
        "served_model_name": "--served-model-name",
        "max_model_len": "--max-model-len",
        "gpu_memory_utilization": "--gpu-memory-utilization",
        "block_size": "--block-size",
        "max_num_seqs": "--max-num-seqs",
        "max_num_batched_tokens": "--max-num-batched-tokens",
        "quantization": "--quantization",
        "dtype": "--dtype",
        "kv_cache_dtype": "--kv-cache-dtype",
    }
    choices: ClassVar[Mapping[str, Collection[str]]] = {
        "quantization": ("awq", "gptq", "compressed-tensors", "gguf", "int8", "int4"),
        "dtype": ("auto", "float32", "float16", "bfloat16"),
        "kv_cache_dtype": ("auto", "float32", "float16", "int8"),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "tensor_parallel_size": "a model that needs several devices is served by vLLM (driver: vllm)",
        "pipeline_parallel_size": "a model that needs several machines is served by vLLM (driver: vllm)",
        "distributed_executor_backend": "a model that needs several machines is served by vLLM (driver: vllm)",
    }
    methods = ("ngram", "suffix", "draft_model", "early_exit")
    metric_names = VLLM_METRICS

    def _program(self) -> Words:
        # This very program, where its environment is not on the path.
        return ["sol", "serve"] if shutil.which("sol") else [sys.executable, "-m", "sol", "serve"]

    def _tensor_parallel_size(self, value: int, spec: EngineSpec) -> Words:
        return self._only_one("tensor_parallel_size", value, spec)

    def _pipeline_parallel_size(self, value: int, spec: EngineSpec) -> Words:
        return self._only_one("pipeline_parallel_size", value, spec)

    def _enable_prefix_caching(self, value: bool, spec: EngineSpec) -> Words:
        return ["--enable-prefix-caching" if value else "--no-enable-prefix-caching"]

    def _without_speculation(self) -> Words:
        return ["--speculation", "off"]

    def _speculate(self, value: SpeculationSpec) -> Words:
        if "draft_model" in value.method.split("+"):
            self._needs_draft_model(value)
        return speculative_config(value)
