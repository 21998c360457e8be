"""What the options of real engines may be, and what a configuration is in an engine's own words."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sol.engines.drivers import DRIVERS
from sol.engines.spec import EngineSpec, engine_spec
from sol.errors import ConfigError
from sol.tune.space import Config, Demand, Parameter, Space

Engine = Literal["sol", "vllm"]

ENGINES: Final[tuple[Engine, ...]] = ("sol", "vllm")

_DEMANDS: Final[Mapping[str, Demand]] = {
    "max_num_seqs": "grows",
    "max_num_batched_tokens": "grows",
    "max_model_len": "grows",
    "block_size": "differs",
    "enable_prefix_caching": "none",
    "speculation": "differs",
    "quantization": "differs",
    "kv_cache_dtype": "differs",
    "dtype": "differs",
    "gpu_memory_utilization": "differs",
    "tensor_parallel_size": "differs",
    "pipeline_parallel_size": "differs",
}
"""The options that may be varied."""

_LOSSLESS: Final[Mapping[str, Any]] = {"quantization": None, "kv_cache_dtype": "auto", "dtype": "auto"}
"""Of the options that change answers the value that does not."""

_WORDS: Final[Mapping[str, Any]] = {"none": None, "true": True, "false": False, "on": True, "off": False}
_SPECULATION_WORDS: Final[Mapping[str, str]] = {
    "none": "off", "false": "off", "off": "off", "true": "auto", "on": "auto", "auto": "auto",
}  # fmt: skip
_OTHER_FLAGS: Final[Mapping[str, str]] = {"speculative_config": "speculation", "num_speculative_tokens": "speculation"}
"""Flags of engines that set what is a parameter by another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """Values for one parameter, as a user gives them: `max_num_seqs=8,16,32`, or a JSON list after the `=`."""

    name: str
    values: tuple[Any, ...]

    @classmethod
    def parse(cls, text: str) -> Variation:
        """Raises `ConfigError`."""
        name, values = parse_variation(text, tuple(_DEMANDS))
        return cls(name=name, values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is tuned: an engine with a model, and what stays as it is. Raises `ConfigError`."""

    engine: Engine
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `EngineSpec`, the same for all configurations."""
    extra_args: tuple[str, ...] = ()
    """Words of the engine's command line."""
    program: str | None = None
    """What to run instead of the engine's own program."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"engine must be one of {', '.join(ENGINES)}, not {self.engine!r}", param="engine")
        self.spec({})

    def spec(self, config: Config) -> EngineSpec:
        """The configuration as an engine's driver takes it. Raises `ConfigError`."""
        options = {**self.options, **{name: value for name, value in config.items() if value is not None}}
        if options.get("speculation") == "auto":
            del options["speculation"]
        return engine_spec({
            "model": self.model, **options, "extra_args": self.extra_args, **({"program": self.program} if self.program
                                                                              else {})
        }, "vary")  # fmt: skip

    def describe(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "model": self.model,
            "options": dict(self.options),
            "extra_args": list(self.extra_args),
            "program": self.program,
        }


def engine_space(
    target: Target,
    *,
    variations: Sequence[Variation] = (),
    speculative_model: str | None = None,
    quantized: bool = False,
    on_cpu: bool = True,
) -> Space:
    """Values that are worth trying, those of `variations` in place of the usual ones. What `target` fixes is not
    varied.

    `quantized`: the checkpoint is, so it has no other precision to offer. Raises `ConfigError`.
    """
    values = _usual(target.engine, speculative_model, quantized, on_cpu)
    check_named_once([variation.name for variation in variations])
    for variation in variations:
        if variation.name in target.options:
            raise ConfigError(f"{variation.name} is given and varied at once: leave one of them out", param="vary")
        values[variation.name] = variation.values
    for word in target.extra_args:
        flag = word.partition("=")[0]
        name = flag.lstrip("-").replace("-", "_").removeprefix("no_")
        name = _OTHER_FLAGS.get(name, name)
        if flag.startswith("--") and name in values:
            raise ConfigError(
                f"engine_args has {flag}, and {name} is varied: one of the two would have no effect. To fix it, give "
                f"--vary {name}=VALUE instead",
                param="engine_args",
            )
    parameters = []
    for name, choices in values.items():
        if name in target.options:
            continue
        lossy = name in _LOSSLESS and len(choices) > 1
        lossless = _LOSSLESS.get(name)
        if lossy and lossless not in choices:
            choices = (lossless, *choices)
        if all(isinstance(choice, (int, float)) and not isinstance(choice, bool) for choice in choices):
            choices = tuple(sorted(choices))
        parameter = Parameter(name=name, values=choices, demand=_DEMANDS[name], lossy=lossy, lossless=lossless)
        for choice in choices:
            DRIVERS[target.engine].command(target.spec({name: choice}), port=1)
        parameters.append(parameter)
    return Space(parameters)


def default_config(space: Space, engine: Engine, *, on_cpu: bool) -> Config:
    """What the engine itself would choose, or the value of the space that is nearest to it."""
    usual: dict[str, Any] = {
        "max_num_seqs": 128 if on_cpu else 256,
        "max_num_batched_tokens": (512 if engine == "sol" else 2048) if on_cpu else 8192,
        "block_size": 16,
        "enable_prefix_caching": True,
        "speculation": "auto" if engine == "sol" else "off",
        "kv_cache_dtype": "auto",
        "dtype": "auto",
    }
    config = {}
    for parameter in space.parameters:
        wanted = usual.get(parameter.name)
        if wanted in parameter.values:
            config[parameter.name] = wanted
        elif parameter.is_ordered and wanted is not None:
            config[parameter.name] = min(parameter.values, key=lambda value: abs(value - wanted))
        else:
            config[parameter.name] = parameter.values[0]
    return config


def _usual(engine: Engine, draft: str | None, quantized: bool, on_cpu: bool) -> dict[str, tuple[Any, ...]]:
    drafted = (
        [{"method": "draft_model", "model": draft, "num_speculative_tokens": k} for k in (2, 4, 8)] if draft else []
    )
    precisions: tuple[str | None, ...]
    if engine == "sol":
        speculation: list[Any] = ["auto", "off", {"method": "ngram", "num_speculative_tokens": 4}, *drafted]
        precisions = () if quantized else (None, "int8", "int4")
        caches = ("auto", "int8") if on_cpu else ("auto",)
    else:
        looked_up = [
            {"method": "ngram", "num_speculative_tokens": k, "options": {"prompt_lookup_max": 4}} for k in (2, 4, 8)
        ]
        speculation = ["off", *looked_up, *drafted]
        # On a CPU vLLM quantises nothing as it loads.
        precisions = () if quantized or on_cpu else (None, "fp8")
        caches = ("auto", "fp8")
    values: dict[str, tuple[Any, ...]] = {
        "speculation": tuple(speculation),
        "max_num_seqs": (4, 8, 16, 32, 64, 128) if on_cpu else (16, 32, 64, 128, 256, 512),
        "max_num_batched_tokens": (128, 256, 512, 1024, 2048) if on_cpu else (512, 1024, 2048, 4096, 8192, 16384),
        "block_size": (16, 32),
        "enable_prefix_caching": (True, False),
    }
    if precisions:
        values["quantization"] = precisions
    if len(caches) > 1:
        values["kv_cache_dtype"] = caches
    return values


def parse_variation(text: str, known: Sequence[str]) -> tuple[str, tuple[Any, ...]]:
    """The name, one of `known`, and its values. Raises `ConfigError`."""
    name, equals, rest = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or not rest.strip():
        raise ConfigError(f"vary must be like max_num_seqs=8,16,32, not {text!r}", param="vary")
    if name not in known:
        raise ConfigError(f"vary: {name!r} is none of {', '.join(known)}", param="vary")
    if not rest.strip().startswith("["):
        return name, tuple(_value(name, word.strip()) for word in rest.split(","))
    try:
        return name, tuple(json.loads(rest))
    except ValueError as error:
        raise ConfigError(f"vary: {rest!r} is no JSON list: {error}", param="vary") from None


def check_named_once(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a name that comes twice: the values of one of the two would be ignored."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"vary: {name} is given twice: give all its values at once", param="vary")


def _value(name: str, word: str) -> Any:
    if name == "speculation":
        return _SPECULATION_WORDS.get(word.lower(), word)
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    for reader in (int, float):
        try:
            return reader(word)
        except ValueError:
            continue
    return word


def serve_options(target: Target, config: Config) -> dict[str, Any]:
    """The options of `sol serve` by their names, as `sol serve --config` reads them. `extra_args` are none of them."""
    merged = {**target.options, **config}
    options: dict[str, Any] = {"model": target.model}
    for name, value in merged.items():
        if name == "speculation" and isinstance(value, dict):
            extra = value.get("options", {})
            options["speculative_config"] = {key: part for key, part in value.items() if key != "options"} | dict(extra)
        elif name == "speculation" and value is False:
            options[name] = "off"
        elif value is not None:
            options[name] = value
    return options


def split_words(text: str) -> tuple[str, ...]:
    """As a shell would. Raises `ConfigError`."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"engine_args {text!r} cannot be split into words: {error}", param="engine_args") from None
