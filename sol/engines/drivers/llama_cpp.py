"""llama.cpp's server, llama-server.

Flags, routes and metrics: tools/server/README.md (common/arg.cpp, tools/server/server-task.cpp).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar

from sol.engines.driver import Driver, Words
from sol.engines.signals import MetricNames
from sol.engines.spec import EngineSpec, SpeculationSpec

_TYPES = {"draft_model": "draft-simple", "eagle3": "draft-eagle3", "mtp": "draft-mtp", "ngram": "ngram-simple"}
_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


class LlamaCpp(Driver):
    """`model` is a GGUF file, or a hub id (`org/name-GGUF:Q4_K_M`). Its KV cache is divided among the requests that it
    computes at once (`max_num_seqs`), so that the cache holds `max_model_len` tokens for each. It has no metric of the
    KV cache. SIGTERM ends what runs."""

    name = "llama.cpp"
    title = "llama.cpp's server"
    program = ("llama-server",)
    always = ("--metrics",)
    flags: ClassVar[Mapping[str, str]] = {
        "served_model_name": "--alias",
        "max_num_seqs": "--parallel",
        "max_num_batched_tokens": "--batch-size",
    }
    choices: ClassVar[Mapping[str, Collection[str]]] = {"kv_cache_dtype": _CACHE_TYPES}
    remedies: ClassVar[Mapping[str, str]] = {
        "quantization": "it takes what the GGUF file is quantised with; name another file as the model",
        "dtype": "it takes what the GGUF file holds; name another file as the model",
        "gpu_memory_utilization": "it fills the device by layers: --fit-target or --gpu-layers in extra_args",
        "block_size": "its KV cache has no blocks; leave it out",
        "tensor_parallel_size": "it splits a model by --split-mode and --tensor-split; write them into extra_args",
        "pipeline_parallel_size": "it splits a model by --split-mode and --tensor-split; write them into extra_args",
        "distributed_executor_backend": "past one machine it takes --rpc; write it into extra_args",
    }
    methods = tuple(_TYPES)
    metric_names = MetricNames(
        running=("llamacpp:requests_processing",),
        waiting=("llamacpp:requests_deferred",),
        kv_usage=("llamacpp:kv_cache_usage_ratio",),  # until 2025
        prefix_hits=("llamacpp:prompt_tokens_cached_total",),
        draft_tokens=("llamacpp:spec_decode_num_draft_tokens_total",),
        accepted_tokens=("llamacpp:spec_decode_num_accepted_tokens_total",),
        progress=("llamacpp:n_decode_total",),
    )

    def _model_words(self, model: str) -> Words:
        return ["--hf-repo" if is_hub_id(model) else "--model", model]

    def _max_model_len(self, value: int, spec: EngineSpec) -> Words:
        return ["--ctx-size", str(value * (spec.max_num_seqs or 1))]

    def _kv_cache_dtype(self, value: str, spec: EngineSpec) -> Words:
        return ["--cache-type-k", value, "--cache-type-v", value]

    def _enable_prefix_caching(self, value: bool, spec: EngineSpec) -> Words:
        return ["--cache-prompt" if value else "--no-cache-prompt"]

    def _tensor_parallel_size(self, value: int, spec: EngineSpec) -> Words:
        return self._only_one("tensor_parallel_size", value, spec)

    def _pipeline_parallel_size(self, value: int, spec: EngineSpec) -> Words:
        return self._only_one("pipeline_parallel_size", value, spec)

    def _speculate(self, value: SpeculationSpec) -> Words:
        self._no_options(value)
        if value.method != "mtp":  # whose heads are in the model's file, or in one beside it
            self._needs_model(value, ("draft_model", "eagle3"))
        words = ["--spec-type", _TYPES[value.method]]
        if value.model is not None:
            words += ["--spec-draft-hf" if is_hub_id(value.model) else "--spec-draft-model", value.model]
        if value.num_speculative_tokens is not None:
            flag = "--spec-ngram-simple-size-m" if value.method == "ngram" else "--spec-draft-n-max"
            words += [flag, str(value.num_speculative_tokens)]
        return words


def is_hub_id(model: str) -> bool:
    """Whether it is `org/name`, `org/name:quantisation`, and not a file's path."""
    return not Path(model).exists() and not model.endswith(".gguf") and model.count("/") == 1 and model[0] not in "./~"
