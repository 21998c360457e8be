"""vLLM.

Flags: vllm/engine/arg_utils.py and vllm/entrypoints/openai/cli_args.py. Metrics: vllm/v1/metrics/loggers.py and
vllm/v1/spec_decode/metrics.py; version 0 called the KV cache `gpu_cache`. Names of speculation's methods:
vllm/config/speculative.py.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from sol.engines.driver import Driver, Words
from sol.engines.signals import MetricNames
from sol.engines.spec import EngineSpec, SpeculationSpec

VLLM_METRICS = MetricNames(
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    prefix_queries=("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    prefix_hits=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    draft_tokens=("vllm:spec_decode_num_draft_tokens_total",),
    accepted_tokens=("vllm:spec_decode_num_accepted_tokens_total",),
    generated_tokens=("vllm:generation_tokens_total",),
    progress=("vllm:iteration_tokens_total_count", "vllm:generation_tokens_total"),
)
"""Sol's server and `sol simulate` have these, too."""


def speculative_config(value: SpeculationSpec) -> Words:
    """`--speculative-config` and its JSON."""
    keys: dict[str, Any] = {"method": value.method}
    if value.model is not None:
        keys["model"] = value.model
    if value.num_speculative_tokens is not None:
        keys["num_speculative_tokens"] = value.num_speculative_tokens
    return ["--speculative-config", json.dumps({**keys, **value.options}, ensure_ascii=False)]


class Vllm(Driver):
    """`gpu_memory_utilization` covers weights, activations and KV cache, as a share of all of the device's memory.

    Past one machine: `distributed_executor_backend: ray`, on a Ray cluster that is there already; the command runs on
    its head node.
    """

    name = "vllm"
    title = "vLLM"
    program = ("vllm", "serve")
    flags: ClassVar[Mapping[str, str]] = {
        "served_model_name": "--served-model-name",
        "max_model_len": "--max-model-len",
        "gpu_memory_utilization": "--gpu-memory-utilization",
        "quantization": "--quantization",
        "dtype": "--dtype",
        "kv_cache_dtype": "--kv-cache-dtype",
        "block_size": "--block-size",
        "tensor_parallel_size": "--tensor-parallel-size",
        "pipeline_parallel_size": "--pipeline-parallel-size",
        "distributed_executor_backend": "--distributed-executor-backend",
        "max_num_seqs": "--max-num-seqs",
        "max_num_batched_tokens": "--max-num-batched-tokens",
    }
    choices: ClassVar[Mapping[str, Collection[str]]] = {
        "dtype": ("auto", "half", "float16", "bfloat16", "float", "float32")
    }
    methods = (
        "ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "dflash", "dspark",
        "ngram_gpu",
    )  # fmt: skip
    metric_names = VLLM_METRICS

    def _enable_prefix_caching(self, value: bool, spec: EngineSpec) -> Words:
        return ["--enable-prefix-caching" if value else "--no-enable-prefix-caching"]

    def _speculate(self, value: SpeculationSpec) -> Words:
        if value.method == "draft_model":
            self._needs_draft_model(value)
        return speculative_config(value)
