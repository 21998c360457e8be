"""SGLang.

Flags: python/sglang/srt/server_args.py and docs/advanced_features/server_arguments.md. Metrics:
python/sglang/srt/observability/metrics_collector.py. Which numbers a chain of drafts takes:
docs/advanced_features/speculative_decoding.ipynb (with a top-k of 1, a step verifies one token more than it drafts:
the one that is settled).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from sol.engines.driver import Driver, Words
from sol.engines.signals import MetricNames
from sol.engines.spec import EngineSpec, SpeculationSpec

_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN", "draft_model": "STANDALONE", "ngram": "NGRAM"}


class Sglang(Driver):
    """`gpu_memory_utilization` covers weights and KV cache and not activations, as a share of the device's memory.

    `/health` is 503 until the model is loaded and warm; it answers before the engine's next step, so that an engine
    that hangs is healthy to it. SIGTERM lets admitted requests finish.
    """

    name = "sglang"
    title = "SGLang"
    program = ("python3", "-m", "sglang.launch_server")
    always = ("--enable-metrics",)
    flags: ClassVar[Mapping[str, str]] = {
        "served_model_name": "--served-model-name",
        "max_model_len": "--context-length",
        "gpu_memory_utilization": "--mem-fraction-static",
        "quantization": "--quantization",
        "dtype": "--dtype",
        "kv_cache_dtype": "--kv-cache-dtype",
        "block_size": "--page-size",
        "tensor_parallel_size": "--tensor-parallel-size",
        "pipeline_parallel_size": "--pipeline-parallel-size",
        "max_num_seqs": "--max-running-requests",
        "max_num_batched_tokens": "--chunked-prefill-size",
    }
    choices: ClassVar[Mapping[str, Collection[str]]] = {
        "dtype": ("auto", "half", "float16", "bfloat16", "float", "float32"),
        "kv_cache_dtype": ("auto", "fp8_e5m2", "fp8_e4m3", "bf16", "bfloat16", "fp4_e2m1"),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "distributed_executor_backend": "past one machine it is started on each of them, with --dist-init-addr, "
        "--nnodes and --node-rank; write these into extra_args",
    }
    methods = tuple(_ALGORITHMS)
    drains = True
    metric_names = MetricNames(
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        kv_usage=("sglang:token_usage",),
        prefix_queries=("sglang:prompt_tokens_total",),
        prefix_hits=("sglang:cached_tokens_total",),
        prefix_hit_rate=("sglang:cache_hit_rate",),
        acceptance_rate=("sglang:spec_accept_rate",),
        progress=("sglang:realtime_tokens_total",),
    )

    def _model_words(self, model: str) -> Words:
        return ["--model-path", model]

    def _enable_prefix_caching(self, value: bool, spec: EngineSpec) -> Words:
        return [] if value else ["--disable-radix-cache"]

    def _speculate(self, value: SpeculationSpec) -> Words:
        self._no_options(value)
        if value.method != "mtp":  # which drafts with a part of the model itself, or with one beside it
            self._needs_model(value, ("eagle", "eagle3", "draft_model"))
        words = ["--speculative-algorithm", _ALGORITHMS[value.method]]
        if value.model is not None:
            words += ["--speculative-draft-model-path", value.model]
        if (drafts := value.num_speculative_tokens) is not None:
            if value.method != "ngram":
                words += ["--speculative-num-steps", str(drafts), "--speculative-eagle-topk", "1"]
            words += ["--speculative-num-draft-tokens", str(drafts + 1)]
        return words
