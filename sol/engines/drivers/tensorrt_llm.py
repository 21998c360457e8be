"""TensorRT-LLM's trtllm-serve.

Flags: tensorrt_llm/commands/serve.py. What has no flag goes into the file that `--config` names (its former name,
`--extra_llm_api_options`, is understood as well): tensorrt_llm/llmapi/llm_args.py, and for speculation
docs/source/features/speculative-decoding.md. Metrics: tensorrt_llm/metrics/collector.py; `/metrics` itself is JSON that
is lost once it was read, and Prometheus' text is at /prometheus/metrics where `return_perf_metrics` is on.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from sol.engines.driver import Driver, Words
from sol.engines.signals import MetricNames
from sol.engines.spec import EngineSpec, SpeculationSpec
from sol.errors import ConfigError

_DECODING_TYPES = {"ngram": "NGram", "draft_model": "DraftTarget", "eagle3": "Eagle3", "mtp": "MTP", "suffix": "SA"}


class TensorrtLlm(Driver):
    """`gpu_memory_utilization` is the share that the KV cache takes of what the weights leave free: two engines on one
    device need other numbers than with vLLM."""

    name = "tensorrt-llm"
    title = "TensorRT-LLM"
    program = ("trtllm-serve",)
    metrics_path = "/prometheus/metrics"
    flags: ClassVar[Mapping[str, str]] = {
        "served_model_name": "--served_model_name",
        "max_model_len": "--max_seq_len",
        "gpu_memory_utilization": "--kv_cache_free_gpu_memory_fraction",
        "tensor_parallel_size": "--tp_size",
        "pipeline_parallel_size": "--pp_size",
        "max_num_seqs": "--max_batch_size",
        "max_num_batched_tokens": "--max_num_tokens",
    }
    choices: ClassVar[Mapping[str, Collection[str]]] = {
        "dtype": ("auto", "float16", "bfloat16", "float32"),
        "kv_cache_dtype": ("auto", "fp8", "nvfp4"),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "quantization": "it takes what the checkpoint is quantised with; name a quantised checkpoint as the model",
        "distributed_executor_backend": "past one machine it is started by MPI; write the whole line into command, "
        "with {port}",
    }
    methods = tuple(_DECODING_TYPES)
    metric_names = MetricNames(
        running=("trtllm_num_requests_running",),
        waiting=("trtllm_num_requests_waiting",),
        kv_usage=("trtllm_kv_cache_utilization",),
        prefix_hit_rate=("trtllm_kv_cache_hit_rate",),
        draft_tokens=("trtllm_spec_decode_num_draft_tokens_total",),
        accepted_tokens=("trtllm_spec_decode_num_accepted_tokens_total",),
    )

    # These go into the file.
    def _dtype(self, value: str, spec: EngineSpec) -> Words:
        return []

    _kv_cache_dtype = _dtype

    def _enable_prefix_caching(self, value: bool, spec: EngineSpec) -> Words:
        return []

    def _block_size(self, value: int, spec: EngineSpec) -> Words:
        return []

    def _speculate(self, value: SpeculationSpec) -> Words:
        self._needs_model(value, ("draft_model", "eagle3"))
        self._needs_number(value)
        return []

    def _file(self, spec: EngineSpec, port: int, directory: Path | None) -> Words:
        directory = Path(tempfile.mkdtemp(prefix="sol-trtllm-")) if directory is None else directory
        path = directory / f"trtllm-{port}.yaml"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.file_options(spec), indent=2) + "\n")  # JSON is YAML
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}", param="directory") from None
        return ["--config", str(path)]

    def file_options(self, spec: EngineSpec) -> dict[str, Any]:
        """What the file says."""
        options: dict[str, Any] = {"return_perf_metrics": True, "enable_iter_perf_stats": True}
        cache = {
            "enable_block_reuse": spec.enable_prefix_caching,
            "tokens_per_block": spec.block_size,
            "dtype": spec.kv_cache_dtype,
        }
        if given := {name: value for name, value in cache.items() if value is not None}:
            options["kv_cache_config"] = given
        if spec.dtype is not None:
            options["dtype"] = spec.dtype
        if spec.speculation:
            keys: dict[str, Any] = {
                "decoding_type": _DECODING_TYPES[spec.speculation.method],
                "max_draft_len": spec.speculation.num_speculative_tokens,
            }
            if spec.speculation.model is not None:
                keys["speculative_model"] = spec.speculation.model
            options["speculative_config"] = {**keys, **spec.speculation.options}
        return options
