"""RoPE's base, scaling and reach, as Hugging Face's config.json says them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from sol.errors import CheckpointError, UnsupportedModelError
from sol.models.config import LinearRopeScaling, Llama3RopeScaling, LongRopeScaling
from sol.models.fields import Fields

_TYPES: Final = ("default", "linear", "llama3", "longrope")
_PHI3_ORIGINAL_LENGTH: Final = 4096

Scaling = Llama3RopeScaling | LinearRopeScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class Ropes:
    theta: float
    scaling: Scaling | None
    rotary_dim: int | None
    local_theta: float | None
    """In layers with a window, where it is another (Gemma 3)."""


def read_ropes(
    fields: Fields,
    *,
    theta: float,
    local_theta: float | None,
    head_dim: int,
    max_position_embeddings: int,
    is_phi3: bool,
) -> Ropes:
    """`theta` and `local_theta` are the family's defaults.

    Gemma 3's `rope_parameters` holds an object for each type of layer; before transformers 5, `rope_local_base_freq`
    stood beside the rest. Raises `CheckpointError` and `UnsupportedModelError`.
    """
    given = fields.values.get("rope_parameters")
    model = _Model(head_dim, max_position_embeddings, is_phi3)
    if local_theta is None:
        return Ropes(*_rope(fields, theta, model), None)
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(given, dict) or not any(kind in given for kind in kinds):
        local = fields.number("rope_local_base_freq", local_theta)
        return Ropes(*_rope(fields, theta, model), local)
    if fields.values.get("rope_scaling"):
        raise CheckpointError(
            f"{fields.origin}: rope_scaling stands beside rope_parameters by type of layer: keep one", param="model"
        )
    unknown = sorted(given.keys() - set(kinds))
    if unknown:
        raise UnsupportedModelError(
            f"{fields.origin}: rope_parameters has {', '.join(unknown)}; supported are {', '.join(kinds)}",
            param="model",
        )
    full, sliding = (
        _rope(Fields({"rope_parameters": given.get(kind)}, f"{fields.origin}: {kind}"), base, model)
        for kind, base in zip(kinds, (theta, local_theta), strict=True)
    )
    if sliding[1] is not None:
        raise UnsupportedModelError(
            f"{fields.origin}: rope_parameters.sliding_attention is scaled; supported is rope_type default",
            param="model",
        )
    return Ropes(*full, sliding[0])


@dataclass(frozen=True, slots=True)
class _Model:
    head_dim: int
    max_position_embeddings: int
    is_phi3: bool


def _rope(fields: Fields, default_theta: float, model: _Model) -> tuple[float, Scaling | None, int | None]:
    """RoPE's base, its scaling, and how many elements of a head it turns where these are not all.

    transformers 5 writes all of it as `rope_parameters`; before, `rope_theta` stood beside `rope_scaling`, whose
    `rope_type` was once called `type`.
    """
    given = {key: fields.values[key] for key in ("rope_parameters", "rope_scaling") if fields.values.get(key)}
    for key, value in given.items():
        if not isinstance(value, dict):
            raise fields.error(key, value, "an object")
    if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        raise CheckpointError(
            f"{fields.origin}: rope_parameters and rope_scaling contradict each other: keep one", param="model"
        )
    name, values = next(iter(given.items()), ("rope_parameters", {}))
    values = {key: value for key, value in values.items() if value is not None}
    for key in ("rope_theta", "partial_rotary_factor"):
        if fields.values.get(key) is not None:
            values.setdefault(key, fields.values[key])
    rope = Fields(values, f"{fields.origin}: {name}")
    theta = rope.number("rope_theta", default_theta)
    rotary_dim = _rotary_dim(rope, model)
    kind = rope.string("rope_type", rope.string("type", "default"))
    if kind == "su" and model.is_phi3:  # longrope's first name
        kind = "longrope"
    read = {"rope_theta", "partial_rotary_factor", "rope_type", "type"}
    scaling: Scaling | None
    if kind == "default":
        scaling = None
        if model.is_phi3:
            read |= {"original_max_position_embeddings"}
    elif kind == "linear":
        scaling = LinearRopeScaling(factor=rope.number("factor"))
        read |= {"factor"}
    elif kind == "llama3":
        scaling = Llama3RopeScaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        )
        read |= {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    elif kind == "longrope":
        scaling = _longrope(fields, rope, model)
        read |= {"short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"}
    else:
        raise UnsupportedModelError(
            f"{rope.origin}: rope_type is {kind!r}; supported is {', '.join(_TYPES)}", param="model"
        )
    unknown = sorted(values.keys() - read)
    if unknown:
        raise UnsupportedModelError(
            f"{rope.origin}: {', '.join(unknown)} is not supported with rope_type {kind!r}; supported are "
            f"{', '.join(sorted(read))}",
            param="model",
        )
    return theta, scaling, rotary_dim


def _rotary_dim(rope: Fields, model: _Model) -> int | None:
    share = rope.number("partial_rotary_factor", 1.0)
    if share == 1.0:
        return None
    if not model.is_phi3:  # transformers' other families turn whole heads
        raise UnsupportedModelError(
            f"{rope.origin}: partial_rotary_factor is {share!r}; supported is 1.0 for this architecture", param="model"
        )
    size = int(model.head_dim * share)
    if share > 1.0 or size < 2 or size % 2:
        raise CheckpointError(
            f"{rope.origin}: partial_rotary_factor is {share!r}, which turns {size} of a head's {model.head_dim} "
            "elements; they must be pairs",
            param="model",
        )
    return size


def _longrope(fields: Fields, rope: Fields, model: _Model) -> LongRopeScaling:
    """LongRoPE (arXiv:2402.13753), by transformers' rules for what is left out."""
    # Where it stands outside, that is what counts (Phi-3's files).
    outside = fields.values.get("original_max_position_embeddings")
    default = _PHI3_ORIGINAL_LENGTH if model.is_phi3 else model.max_position_embeddings
    original = (fields if outside is not None else rope).integer("original_max_position_embeddings", default)
    factor = rope.number("factor", model.max_position_embeddings / original)
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 and original > 1 else 1.0
    return LongRopeScaling(
        short_factors=_factors(rope, "short_factor"),
        long_factors=_factors(rope, "long_factor"),
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", attention),
    )


def _factors(rope: Fields, key: str) -> tuple[float, ...]:
    values: Any = rope.values.get(key)
    if not isinstance(values, list) or not all(
        type(value) in (int, float) and math.isfinite(value) and value > 0 for value in values
    ):
        raise rope.error(key, values, "a list of numbers greater than 0")
    return tuple(map(float, values))
