"""How an engine speculates, as the user asked: vLLM's keys of `--speculative-config`, and Sol's own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from sol.errors import ConfigError

VerifyMethod = Literal["coupled", "rejection", "block"]
DraftSampleMethod = Literal["greedy", "coupled", "independent"]
Controller = Literal["goodput", "fixed"]

DRAFTERS: Final = ("ngram", "suffix", "draft_model", "early_exit")
"""In the order in which they are asked: what looks tokens up comes before what computes them."""

_NEEDS_MODEL: Final = "draft_model"
_NOT_YET: Final = ("eagle", "eagle3", "medusa", "mtp", "dflash", "dspark", "mlp_speculator")
_DEFAULT_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Settled and checked. `drafters` is empty where nothing is to be drafted."""

    drafters: tuple[str, ...] = ("suffix",)
    model: str | None = None
    """The draft model's path, hub id or pypi:NAME"""
    num_speculative_tokens: int = _DEFAULT_TOKENS
    """The most drafts that a step verifies for a request"""
    verify_method: VerifyMethod = "coupled"
    draft_sample_method: DraftSampleMethod = "coupled"
    """How a model drafter picks tokens for a request that samples: `coupled` goes with coupled verification alone,
    `independent` with rejection and block (each the default there), `greedy` with all three."""
    controller: Controller = "goodput"
    """`fixed` drafts as much as it can at every step, whatever it costs."""
    prompt_lookup_min: int = 2
    """If one of the two is given alone, the other is the same, as in vLLM."""
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 0
    """Past outputs that are remembered for each tenant; 0: none"""
    suffix_decoding_max_spec_factor: float = 8.0
    """vLLM's 1.0 and 0.1 stop many a draft that would have been right; here the controller knows when to stop."""
    suffix_decoding_min_token_prob: float = 0.05
    num_exit_layers: int | None = None
    """Layers of the target that `early_exit` runs; None: a quarter of them"""

    @property
    def lookup_only(self) -> bool:
        """No drafter computes a model."""
        return all(name in ("ngram", "suffix") for name in self.drafters)


OFF: Final = SpeculativeConfig(drafters=())

_ALIASES: Final = {"rejection_sample_method": "verify_method"}
_RENAMED_VALUES: Final = {("verify_method", "strict"): "rejection", ("verify_method", "standard"): "rejection",
                          ("draft_sample_method", "probabilistic"): "independent"}  # fmt: skip
_INTS: Final = {
    "num_speculative_tokens": (1, 64),
    "prompt_lookup_min": (1, 64),
    "prompt_lookup_max": (1, 64),
    "suffix_decoding_max_tree_depth": (2, 256),
    "suffix_decoding_max_cached_requests": (0, 1_000_000),
    "num_exit_layers": (1, 10_000),
}
_FLOATS: Final = {
    "suffix_decoding_max_spec_factor": (0.0, 64.0),
    "suffix_decoding_min_token_prob": (0.0, 1.0),
}


def speculative_config(
    *,
    speculation: str,
    model: str | None,
    num_speculative_tokens: int | None,
    options: Mapping[str, Any] | str | None,
) -> SpeculativeConfig:
    """From the engine's options: `speculation` ("auto" or "off"), `speculative_model`, `num_speculative_tokens`,
    `speculative_config`.

    Without a method, text is looked up (`suffix`), and a model drafts too if one is given. Raises `ConfigError`
    naming the key.
    """
    given = _read(options)
    if speculation == "off":
        asked = [
            name
            for name, value in (
                ("speculative_model", model),
                ("num_speculative_tokens", num_speculative_tokens),
                ("speculative_config", given or None),
            )
            if value is not None
        ]
        if asked:
            raise ConfigError(f"speculation is off, but {asked[0]} is given: leave out one of them", param=asked[0])
        return OFF
    for name, value in (("model", model), ("num_speculative_tokens", num_speculative_tokens)):
        if value is not None:
            if given.get(name, value) != value:
                raise ConfigError(
                    f"speculative_config.{name} is {given[name]!r}, but the option beside it says {value!r}",
                    param="speculative_config",
                )
            given[name] = value
    return _settle(given)


def _read(options: Mapping[str, Any] | str | None) -> dict[str, Any]:
    if options is None:
        return {}
    if isinstance(options, str):
        try:
            options = json.loads(options)
        except ValueError as error:
            raise ConfigError(
                f'speculative_config is not JSON ({error}): write it like \'{{"method": "suffix"}}\'',
                param="speculative_config",
            ) from None
    if not isinstance(options, Mapping):
        raise ConfigError(f"speculative_config must be a JSON object, not {options!r}", param="speculative_config")
    return {_ALIASES.get(name, name): value for name, value in options.items() if value is not None}


def _settle(given: dict[str, Any]) -> SpeculativeConfig:
    method = given.pop("method", None)
    if given.pop("draft_tensor_parallel_size", 1) != 1:
        raise _wrong("draft_tensor_parallel_size", "1: a drafter runs on one device")
    fields = {item.name: item for item in dataclasses.fields(SpeculativeConfig) if item.name != "drafters"}
    for name in given:
        if name not in fields:
            raise ConfigError(
                f"speculative_config has no key {name!r}; it knows method, {', '.join(fields)}",
                param="speculative_config",
            )
    values: dict[str, Any] = {}
    for name, value in given.items():
        values[name] = _checked(name, _RENAMED_VALUES.get((name, value), value) if isinstance(value, str) else value)
    for one, other in (("prompt_lookup_min", "prompt_lookup_max"), ("prompt_lookup_max", "prompt_lookup_min")):
        if one in values:  # as vLLM does
            values.setdefault(other, values[one])
    drafters = _drafters(method, values)
    if _NEEDS_MODEL in drafters and "model" not in values:
        raise ConfigError(
            'speculative_config.method is "draft_model", but no model is given: set speculative_config.model or '
            "--speculative-model",
            param="speculative_config",
        )
    if "model" in values and _NEEDS_MODEL not in drafters:
        raise ConfigError(
            f"a speculative model is given, but speculative_config.method is {method!r}, which has no use for it",
            param="speculative_config",
        )
    if values.get("verify_method", "coupled") != "coupled":
        values.setdefault("draft_sample_method", "independent")
    settled = SpeculativeConfig(drafters=drafters, **values)
    if settled.prompt_lookup_min > settled.prompt_lookup_max:
        raise _wrong("prompt_lookup_min", f"at most prompt_lookup_max ({settled.prompt_lookup_max})")
    if settled.draft_sample_method == "independent" and settled.verify_method == "coupled":
        raise ConfigError(
            'draft_sample_method is "independent", but coupled verification accepts only the token the target samples '
            'with its own noise: use "coupled" or "greedy", or verify_method "rejection" or "block"',
            param="speculative_config",
        )
    if settled.draft_sample_method == "coupled" and settled.verify_method != "coupled":
        # How many drafts are verified may depend on what they are. Where none is, the target samples with the noise
        # that the drafts came from: it would say more often what drafts with little hope look like.
        raise ConfigError(
            f'draft_sample_method is "coupled", but verify_method "{settled.verify_method}" keeps the target\'s law '
            'only if drafts do not share its noise: use "independent" or "greedy", or verify_method "coupled"',
            param="speculative_config",
        )
    return settled


def _drafters(method: Any, values: Mapping[str, Any]) -> tuple[str, ...]:
    if method is None or method == "auto":
        return ("suffix", _NEEDS_MODEL) if "model" in values else ("suffix",)
    if not isinstance(method, str):
        raise _wrong("method", f"a string, not {method!r}")
    names = method.split("+")
    for name in names:
        if name in _NOT_YET:
            raise ConfigError(
                f"speculative_config.method {name!r} is not supported yet: use one of {', '.join(DRAFTERS)}, or "
                'several joined by "+"',
                param="speculative_config",
            )
        if name not in DRAFTERS:
            raise ConfigError(
                f'speculative_config.method must be {", ".join(DRAFTERS)}, several of them joined by "+", or "auto", '
                f"not {method!r}",
                param="speculative_config",
            )
    return tuple(name for name in DRAFTERS if name in names)


def _checked(name: str, value: Any) -> Any:
    if name in _INTS:
        low, high = _INTS[name]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _wrong(name, f"a whole number from {low} to {high}, not {value!r}")
        return value
    if name in _FLOATS:
        least, most = _FLOATS[name]
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
            raise _wrong(name, f"a number from {least} to {most}, not {value!r}")
        return float(value)
    if name == "model":
        if not isinstance(value, str) or not value:
            raise _wrong(name, f"a path, a hub id or pypi:NAME, not {value!r}")
        return value
    choices = get_args(
        {"verify_method": VerifyMethod, "draft_sample_method": DraftSampleMethod, "controller": Controller}[name]
    )
    if value not in choices:
        raise _wrong(name, f"{', '.join(choices)}, not {value!r}")
    return value


def _wrong(name: str, allowed: str) -> ConfigError:
    return ConfigError(f"speculative_config.{name} must be {allowed}", param="speculative_config")
