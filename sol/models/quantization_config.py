"""`quantization_config` of a config.json: how the matrices of a quantised safetensors checkpoint are stored.

Three methods are read: AWQ (AutoAWQ's gemm layout), GPTQ (AutoGPTQ's layout and GPTQModel's second version of it) and
compressed-tensors (pack-quantized and int-quantized). Whatever would change a weight and is not understood is an
`UnsupportedModelError`; keys that only say how a checkpoint was made are not read. Knows no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from sol.errors import CheckpointError, ConfigError, UnsupportedModelError
from sol.models.fields import Fields

Layout = Literal["awq", "gptq", "packed", "int8"]

METHODS: Final = ("awq", "gptq", "compressed-tensors")
REQUANTIZING: Final[tuple[Literal["int8", "int4"], ...]] = ("int8", "int4")
"""Values of `EngineConfig.quantization` that quantise a full-precision checkpoint as it is loaded."""

_REMEDY: Final = "use another export of the model, or its full-precision checkpoint with quantization int8 or int4"

# What describes a compressed-tensors checkpoint without changing a weight.
_COMPRESSED_KEYS: Final = frozenset(
    ("quant_method", "format", "config_groups", "ignore", "quantization_status", "global_compression_ratio", "version",
     "run_compressed")
)  # fmt: skip
_WEIGHT_KEYS: Final = frozenset(
    ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder", "observer", "observer_kwargs",
     "scale_dtype", "zp_dtype")
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the matrix of a module is stored."""

    layout: Layout
    bits: int
    group_size: int | None
    """Neighbours in a row that share a scale; None: the whole row"""
    symmetric: bool
    """No zero points but the middle one."""
    zero_offset: int = 0
    """Added to stored zero points: GPTQ's first version stores them less one"""
    act_order: bool = False
    """Whether columns may have been grouped in another order than they stand in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """A method (vLLM's name) and which modules it was applied to."""

    method: str
    """One of `METHODS`, or "gguf": there every tensor says itself how it is stored, and `groups` is empty."""
    groups: tuple[tuple[tuple[str, ...], Scheme], ...] = ()
    """Targets and their scheme. A target is a module's name, `re:` and a pattern for it, or the class `Linear`."""
    ignore: tuple[str, ...] = ()
    """Targets that stay as they are."""

    def scheme(self, module: str) -> Scheme | None:
        """What applies to a linear module, by name; None if nothing does. An exact name wins over a pattern, a pattern
        over a class, as in compressed-tensors."""
        if any(_matches(module, target) for target in self.ignore):
            return None
        best: tuple[int, Scheme] | None = None
        for targets, scheme in self.groups:
            for target in targets:
                rank = _matches(module, target)
                if rank and (best is None or rank > best[0]):
                    best = rank, scheme
        return None if best is None else best[1]

    def __str__(self) -> str:
        schemes = dict.fromkeys(scheme for _, scheme in self.groups)
        parts = [
            f"{scheme.bits} bits, " + (f"groups of {scheme.group_size}" if scheme.group_size else "one scale a row")
            for scheme in schemes
        ]
        return f"{self.method} ({'; '.join(parts)})" if parts else self.method


def check_request(requested: str | None, found: QuantizationConfig | None, model: str) -> None:
    """Whether `EngineConfig.quantization` goes with what the checkpoint of `model` is. Raises `ConfigError`."""
    if requested is None:
        return
    if requested in REQUANTIZING:
        if found is not None:
            raise ConfigError(
                f"quantization is {requested!r}, which quantises a full-precision checkpoint, but {model} is quantised "
                f"already: {found}. Leave quantization out, or use the model's full-precision checkpoint",
                param="quantization",
            )
    elif found is None or found.method != requested:
        what = "in full precision" if found is None else f"quantised: {found}"
        raise ConfigError(
            f"quantization is {requested!r}, but {model} is {what}. Leave quantization out"
            + (f", or ask for one of {', '.join(REQUANTIZING)}" if found is None else ""),
            param="quantization",
        )


def read(value: Any, origin: str) -> QuantizationConfig:
    """Reads `quantization_config`; `origin` is what errors call the place it stands in.

    Raises `UnsupportedModelError` for a method, width, grouping or format that Sol does not read and `CheckpointError`
    for values that are missing or ill-typed, naming the field and the value.
    """
    if not isinstance(value, dict):
        raise CheckpointError(f"{origin}: quantization_config must be an object, not {value!r}", param="model")
    fields = Fields(value, f"{origin}: quantization_config")
    method = fields.string("quant_method").lower()
    if method == "awq":
        return _awq(fields)
    if method == "gptq":
        return _gptq(fields)
    if method == "compressed-tensors":
        return _compressed_tensors(fields)
    raise _unsupported(fields, "quant_method", method, ", ".join(METHODS))


def _awq(fields: Fields) -> QuantizationConfig:
    version = fields.string("version", "gemm").lower()
    if version != "gemm":
        raise _unsupported(fields, "version", version, "gemm")
    bits = fields.integer("bits", fields.integer("w_bit", 4))
    if bits != 4:
        raise _unsupported(fields, "bits", bits, "4")
    key = "group_size" if "group_size" in fields.values else "q_group_size"
    scheme = Scheme(layout="awq", bits=bits, group_size=_group_size(fields, key, 128), symmetric=False)
    return QuantizationConfig(method="awq", groups=((("Linear",), scheme),))


def _gptq(fields: Fields) -> QuantizationConfig:
    values = fields.values
    checkpoint_format = fields.string("checkpoint_format", fields.string("format", "gptq")).lower()
    if values.get("is_marlin_format"):
        raise _unsupported(fields, "is_marlin_format", True, "false")
    if checkpoint_format not in ("gptq", "gptq_v2"):
        raise _unsupported(fields, "checkpoint_format", checkpoint_format, "gptq, gptq_v2")
    pack_dtype = fields.string("pack_dtype", "int32")
    if pack_dtype != "int32":
        raise _unsupported(fields, "pack_dtype", pack_dtype, "int32")
    for key in ("adapter", "rotation"):
        if values.get(key):
            raise _unsupported(fields, key, values[key], "none")
    # GPTQModel's rules for single modules: "-:pattern" leaves some as they are, which their tensors show as well.
    dynamic = values.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise fields.error("dynamic", dynamic, "an object")
    overrides = sorted(key for key in dynamic if not key.startswith("-:"))
    if overrides:
        raise _unsupported(fields, "dynamic", overrides[0], "rules that begin with -: (modules left as they are)")
    bits = fields.integer("bits")
    symmetric = fields.boolean("sym", True)
    group_size = _group_size(fields, "group_size", 128)
    if bits == 8 and (group_size is not None or not symmetric):
        found = f"8 with group_size {values.get('group_size', 128)} and sym {symmetric}"
        raise _unsupported(fields, "bits", found, "4, and 8 with group_size -1 and sym true")
    if bits not in (4, 8):
        raise _unsupported(fields, "bits", bits, "4, and 8 with group_size -1 and sym true")
    scheme = Scheme(
        layout="gptq",
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        zero_offset=1 if checkpoint_format == "gptq" else 0,
        act_order=fields.boolean("desc_act", False),
    )
    return QuantizationConfig(method="gptq", groups=((("Linear",), scheme),))


def _compressed_tensors(fields: Fields) -> QuantizationConfig:
    values = fields.values
    for key, value in values.items():
        # An empty object, "dense" for the sparsity that there is none of, and null mean nothing.
        if key in _COMPRESSED_KEYS or not value or value == {"format": "dense"}:
            continue
        raise _unsupported(fields, key, value, "none")
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise fields.error("config_groups", groups, "an object with at least one group")
    read_groups = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise fields.error(f"config_groups.{name}", group, "an object")
        read_groups.append(_compressed_group(Fields(group, f"{fields.origin}.config_groups.{name}"), fields))
    return QuantizationConfig(
        method="compressed-tensors", groups=tuple(read_groups), ignore=_targets(fields, "ignore", values.get("ignore"))
    )


def _compressed_group(group: Fields, top: Fields) -> tuple[tuple[str, ...], Scheme]:
    targets = _targets(group, "targets", group.values.get("targets"))
    where = group if group.values.get("format") is not None else top
    stored_format = where.string("format")
    if stored_format not in ("pack-quantized", "int-quantized", "naive-quantized"):
        raise _unsupported(where, "format", stored_format, "pack-quantized, int-quantized, naive-quantized")
    _check_activations(group)
    weights_value = group.values.get("weights")
    if not isinstance(weights_value, dict):
        raise group.error("weights", weights_value, "an object")
    weights = Fields(weights_value, f"{group.origin}.weights")
    for key, value in weights.values.items():
        if key not in _WEIGHT_KEYS and value:
            raise _unsupported(weights, key, value, "none")
    _require(weights, "type", weights.string("type", "int"), ("int",))
    _require(weights, "dynamic", weights.boolean("dynamic", False), (False,))
    bits = weights.integer("num_bits", 8)
    strategy = weights.string("strategy", "tensor" if weights.values.get("group_size") is None else "group")
    symmetric = weights.boolean("symmetric", True)
    # "group" was called true and "dynamic" as well; of the other, "weight" or "static", nothing is left in the file.
    act_order = weights.values.get("actorder")
    _require(weights, "actorder", act_order, (None, False, True, "group", "dynamic", "weight", "static"))
    if stored_format == "pack-quantized":
        _require(weights, "num_bits", bits, (4, 8))
    else:
        _require(weights, "num_bits", bits, (8,))
    if bits == 8:
        _require(weights, "strategy", strategy, ("tensor", "channel"))
        _require(weights, "symmetric", symmetric, (True,))
    else:
        _require(weights, "strategy", strategy, ("tensor", "channel", "group"))
    scheme = Scheme(
        layout="packed" if stored_format == "pack-quantized" else "int8",
        bits=bits,
        group_size=_group_size(weights, "group_size", None) if strategy == "group" else None,
        symmetric=symmetric,
        act_order=act_order in ("group", "dynamic", True),
    )
    return targets, scheme


def _check_activations(group: Fields) -> None:
    """Activations that the kernels round on their own are allowed; those with a calibrated scale are not the same."""
    for key in ("output_activations",):
        if group.values.get(key):
            raise _unsupported(group, key, group.values[key], "null")
    value = group.values.get("input_activations")
    if not value:
        return
    if not isinstance(value, dict):
        raise group.error("input_activations", value, "an object or null")
    activations = Fields(value, f"{group.origin}.input_activations")
    _require(activations, "type", activations.string("type", "int"), ("int",))
    _require(activations, "num_bits", activations.integer("num_bits", 8), (8,))
    _require(activations, "dynamic", activations.values.get("dynamic", False), (True,))


def _require(fields: Fields, key: str, value: Any, supported: tuple[Any, ...]) -> None:
    if value not in supported:
        raise _unsupported(fields, key, value, ", ".join(map(str, supported)))


def _group_size(fields: Fields, key: str, default: int | None) -> int | None:
    """-1 and null: one group a row. The kernels' groups are 32, 64 and 128 long, so any multiple of 32 can be had."""
    value = fields.values.get(key, default)
    if value is None or value == -1:
        return None
    if type(value) is not int or value < 1:
        raise fields.error(key, value, "-1 or a whole number of at least 1")
    if value % 32:
        raise _unsupported(fields, key, value, "multiples of 32, and -1 for one scale a row")
    return value


def _targets(fields: Fields, key: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise fields.error(key, value, "a list of strings")
    for item in value:
        if item.startswith("re:"):
            try:
                re.compile(item[3:])
            except re.error as error:
                raise CheckpointError(
                    f"{fields.origin}: {key} has {item!r}, which is no regular expression ({error})", param="model"
                ) from None
    return tuple(value)


def _matches(module: str, target: str) -> int:
    """0 if not, else how strongly."""
    if target == module:
        return 3
    if target.startswith("re:"):
        return 2 if re.match(target[3:], module) else 0
    return 1 if target == "Linear" else 0


def _unsupported(fields: Fields, key: str, value: Any, supported: str) -> UnsupportedModelError:
    shown = value if not isinstance(value, Mapping) else dict(value)
    return UnsupportedModelError(
        f"{fields.origin}: {key} is {shown!r}; supported is {supported}: {_REMEDY}", param="model"
    )
