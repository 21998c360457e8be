"""Hugging Face's text-generation-inference.

Flags: docs/source/reference/launcher.md (launcher/src/main.rs, also for PREFIX_CACHING). Metrics:
docs/source/reference/metrics.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from sol.engines.driver import Driver, Words
from sol.engines.signals import MetricNames
from sol.engines.spec import EngineSpec, SpeculationSpec
from sol.errors import ConfigError


class Tgi(Driver):
    """`gpu_memory_utilization` covers all that the process allocates, as a share of the device's memory.

    It serves one model and answers to any model's name. SIGTERM lets admitted requests finish. It has no metric of the
    KV cache.
    """

    name = "tgi"
    title = "TGI"
    program = ("text-generation-launcher",)
    host_flag = "--hostname"
    flags: ClassVar[Mapping[str, str]] = {
        "gpu_memory_utilization": "--cuda-memory-fraction",
        "quantization": "--quantize",
        "kv_cache_dtype": "--kv-cache-dtype",
        "tensor_parallel_size": "--num-shard",
        "max_num_seqs": "--max-batch-size",
        "max_num_batched_tokens": "--max-batch-prefill-tokens",
    }
    choices: ClassVar[Mapping[str, Collection[str]]] = {
        "quantization": (
            "awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin", "bitsandbytes", "bitsandbytes-nf4",
            "bitsandbytes-fp4", "fp8",
        ),
        "dtype": ("float16", "bfloat16"),
        "kv_cache_dtype": ("fp8_e4m3fn", "fp8_e5m2"),
    }  # fmt: skip
    remedies: ClassVar[Mapping[str, str]] = {
        "served_model_name": "it answers to any name; leave it out",
        "pipeline_parallel_size": "it splits a model by tensors alone: tensor_parallel_size",
        "distributed_executor_backend": "it stays on one machine; past that, use vLLM (driver: vllm)",
        "block_size": "its blocks are of a fixed size; leave it out",
    }
    methods = ("ngram", "medusa")
    drains = True
    metric_names = MetricNames(
        running=("tgi_batch_current_size",),
        waiting=("tgi_queue_size",),
        progress=("tgi_batch_inference_count",),
    )

    def _model_words(self, model: str) -> Words:
        return ["--model-id", model]

    def _max_model_len(self, value: int, spec: EngineSpec) -> Words:
        # Of the two limits neither follows from the other in all versions.
        return ["--max-total-tokens", str(value), "--max-input-tokens", str(max(value - 1, 1))]

    def _dtype(self, value: str, spec: EngineSpec) -> Words:
        if spec.quantization is not None:
            raise ConfigError(f"dtype {value!r} and quantization exclude each other in TGI; give one", param="dtype")
        return ["--dtype", value]

    def _pipeline_parallel_size(self, value: int, spec: EngineSpec) -> Words:
        return self._only_one("pipeline_parallel_size", value, spec)

    def _enable_prefix_caching(self, value: bool, spec: EngineSpec) -> Words:
        return []  # a variable of the environment

    def _environment(self, spec: EngineSpec) -> dict[str, str]:
        if spec.enable_prefix_caching is None:
            return {}
        return {"PREFIX_CACHING": "1" if spec.enable_prefix_caching else "0"}

    def _speculate(self, value: SpeculationSpec) -> Words:
        # Medusa's heads are found beside the model; without them the same flag means n-grams.
        self._no_options(value)
        self._needs_model(value, ())
        return ["--speculate", str(self._needs_number(value))]
