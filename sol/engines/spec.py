"""What to start: one model on one engine, in words that all engines share. A driver turns it into that engine's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from sol.errors import ConfigError

Count = Annotated[int, Field(ge=1, lt=2**63, strict=True)]
Words = Annotated[str, Field(min_length=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class SpeculationSpec(_Part):
    """How to speculate, with the keys of vLLM's `--speculative-config`."""

    method: Words
    """`ngram`, `suffix`, `draft_model`, `early_exit`, `eagle`, `eagle3`, `mtp` …: what a driver knows. Sol takes
    several, joined by "+"."""
    model: Words | None = None
    """The draft model, as the engine names models."""
    num_speculative_tokens: Count | None = None
    """The most drafts a step; None: the engine's default."""
    options: dict[str, Any] = Field(default_factory=dict)
    """More keys of the engine's own speculative configuration, for engines that take one (Sol, vLLM, TensorRT-LLM)."""


def _switch(value: Any) -> Any:
    # YAML 1.1 reads `speculation: off` as false; JSON and Python have the word.
    return False if value == "off" else value


class EngineSpec(_Part):
    """None everywhere means: what the engine chooses. Names and meanings are vLLM's."""

    model: Words | None = None
    """A path, a hub id, or what else the engine understands."""
    served_model_name: Words | None = None
    """What clients call it; None: `model`."""
    max_model_len: Count | None = None
    """Longest prompt plus output, in tokens."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """The engine's share of the device's memory. What it covers differs; see each driver."""
    quantization: Words | None = None
    dtype: Words | None = None
    kv_cache_dtype: Words | None = None
    enable_prefix_caching: bool | None = None
    block_size: Count | None = None
    """Tokens in a block (page) of the KV cache."""
    tensor_parallel_size: Count | None = None
    pipeline_parallel_size: Count | None = None
    distributed_executor_backend: Literal["ray", "mp"] | None = None
    """`ray` for an engine that spans machines, on a Ray cluster that is there already."""
    max_num_seqs: Count | None = None
    """Most requests in one step."""
    max_num_batched_tokens: Count | None = None
    """Most tokens in one step."""
    speculation: Annotated[SpeculationSpec | Literal[False] | None, BeforeValidator(_switch)] = None
    """False, or the word off: never."""
    extra_args: tuple[str, ...] = ()
    """Further words of the engine's command line, as they are."""
    env: dict[Annotated[str, Field(pattern=r"^[^=\x00]+$")], str] = Field(default_factory=dict)
    """Added to our environment, for instance CUDA_VISIBLE_DEVICES."""
    program: Words | None = None
    """What to run instead of the engine's program on the path: `/opt/vllm/bin/vllm serve`."""
    command: Words | None = None
    """A whole command line instead of all of the above but `env`; a port is added where its program is known, else
    `{port}` says where it goes."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.command is None:
            if self.model is None:
                raise ValueError("needs a model, or a command")
        elif others := sorted(self.model_fields_set - {"command", "env"}):
            raise ValueError(f"command is a whole command line; leave out {', '.join(others)}, or write them into it")
        return self

    def given(self) -> dict[str, Any]:
        """The options by name that are not None and that a driver has to turn into something."""
        skipped = {"extra_args", "env", "program", "command"}
        named = ((name, getattr(self, name)) for name in type(self).model_fields if name not in skipped)
        return {name: value for name, value in named if value is not None}


def engine_spec(options: Mapping[str, Any], where: str = "spec") -> EngineSpec:
    """The spec of a mapping, for instance from YAML. `where` begins the names in errors. Raises `ConfigError`."""
    try:
        return EngineSpec.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # Which member of a union did not fit is pydantic's business, and not in the file.
        path = [str(part) for part in first["loc"] if not str(part).startswith(("SpeculationSpec", "literal["))]
        name = ": ".join(filter(None, [where, *path]))
        text = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            fields = SpeculationSpec.model_fields if "speculation" in path else EngineSpec.model_fields
            text = f"there is no such option; there are {', '.join(fields)}"
        elif first["type"] != "value_error":
            text = f"{text}, not {first['input']!r}"
        raise ConfigError(f"{name}: {text}" if name else text, param=".".join(filter(None, [where, *path]))) from None
