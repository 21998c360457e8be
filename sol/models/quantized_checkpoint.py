"""Safetensors checkpoints quantised with AWQ, GPTQ or compressed-tensors, under the names of the plain weights.

The tensors that a quantised module consists of (`qweight`, `scales` …) appear as the one matrix that they stand for,
`….weight`. Which modules are quantised, the tensors themselves say: a module left as it is has a plain weight. Types
and shapes of all of them are compared with the configuration when the checkpoint is opened, before any is read.
"""

from __future__ import annotations

from typing import Final

import torch

from sol.errors import CheckpointError, UnsupportedModelError
from sol.models.config import ModelConfig
from sol.models.dummy_checkpoint import parameter_shapes
from sol.models.packing import int4_group, int4_nbytes, kernel_group_size, unpack, unpack_awq, unpack_down
from sol.models.quantization_config import Layout, Scheme
from sol.models.safetensors_files import DTYPES, FLOATING, SafetensorsFiles
from sol.models.source import ModelFiles
from sol.ops.dequantize import dequantize
from sol.ops.weights import Dense, Int4Group, Int8Channel, Stored

_PARTS: Final[dict[Layout, tuple[frozenset[str], frozenset[str]]]] = {
    "awq": (frozenset(("qweight", "qzeros", "scales")), frozenset()),
    "gptq": (frozenset(("qweight", "qzeros", "scales")), frozenset(("g_idx",))),
    "packed": (
        frozenset(("weight_packed", "weight_scale")),
        frozenset(("weight_shape", "weight_zero_point", "weight_g_idx")),
    ),
    "int8": (frozenset(("weight", "weight_scale")), frozenset(("weight_zero_point",))),
}
"""Suffixes of the tensors of a module: those that have to be there, and those that may."""
_SIGNS: Final = frozenset(("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale"))
"""Suffixes by which a quantised module is known."""
_ORDERS: Final = frozenset(("g_idx", "weight_g_idx"))


class QuantizedCheckpoint:
    """Implements `sol.models.checkpoint.Checkpoint`; `load` dequantises.

    Raises `CheckpointError` naming the tensor that is missing, misshapen, out of range or not finite, and
    `UnsupportedModelError` for a matrix that no kernel's groups divide.
    """

    def __init__(self, files: ModelFiles, config: ModelConfig) -> None:
        assert config.quantization is not None
        self._quantization = config.quantization
        self._root = files.root
        self._files = SafetensorsFiles(files, tuple(DTYPES))
        self._expected = parameter_shapes(config)
        self._modules: dict[str, Scheme] = {}
        """By the name of their weight."""
        self._stored: dict[str, int] = {name: tensor.nbytes for name, tensor in self._files.tensors.items()}
        parts: dict[str, set[str]] = {}
        for name in self._files.tensors:
            module, _, suffix = name.rpartition(".")
            parts.setdefault(module, set()).add(suffix)
        for module, found in sorted(parts.items()):
            if found & _SIGNS:
                self._open_module(module, found - {"bias"})
        self._drop_zero_biases()
        for name in self._stored:
            tensor = self._files.tensors.get(name)
            if name not in self._modules and tensor is not None and tensor.dtype not in FLOATING:
                raise UnsupportedModelError(
                    f"{tensor.path}: tensor {name} has the type {tensor.dtype}, which a checkpoint of "
                    f"{self._quantization.method} does not have there",
                    param="model",
                )

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._expected[name] if name in self._modules else self._files.tensors[name].shape

    def stored_nbytes(self, name: str) -> int:
        return self._stored[name]

    @property
    def nbytes(self) -> int:
        return sum(self._stored.values())

    def load(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        if name in self._modules:
            return dequantize(self.stored(name), dtype).to(device)
        return self._files.read(name).to(device=device).to(dtype=dtype)

    def stored(self, name: str) -> Stored:
        scheme = self._modules.get(name)
        if scheme is None:
            return Dense(self._files.read(name))
        module = name.removesuffix(".weight")
        rows, in_features = self._expected[name]
        if scheme.layout == "int8":
            return Int8Channel(self._files.read(name), self._row_scales(f"{module}.weight_scale", rows))
        if scheme.layout == "packed":
            return self._packed(module, scheme, rows, in_features)
        return self._downward(module, scheme, rows, in_features)

    # --- opening

    def _open_module(self, module: str, found: set[str]) -> None:
        name = f"{module}.weight"
        scheme = self._quantization.scheme(module)
        if scheme is None or name not in self._expected:
            what = "quantization_config leaves it alone" if name in self._expected else "the model has no such module"
            raise CheckpointError(
                f"{self._root}: {module} has quantised tensors, but {what}: weights and configuration do not belong "
                "together",
                param="model",
            )
        required, optional = _PARTS[scheme.layout]
        if scheme.act_order and scheme.group_size is not None:
            required = required | (optional & _ORDERS)
        missing, unknown = sorted(required - found), sorted(found - required - optional)
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks the tensor {module}.{missing[0]}, which {self._quantization.method} needs "
                f"beside {module}.{min(found)}",
                param="model",
            )
        if unknown:
            raise CheckpointError(
                f"the checkpoint has the tensor {module}.{unknown[0]}, which does not belong to a matrix quantised "
                f"with {self._quantization.method}",
                param="model",
            )
        self._check_shapes(module, scheme, found)
        self._modules[name] = scheme
        for part in found:
            del self._stored[f"{module}.{part}"]
        rows, in_features = self._expected[name]
        group_size = kernel_group_size(scheme.group_size, in_features)
        if scheme.bits == 8:
            self._stored[name] = rows * (in_features + 4)
        else:
            assert group_size is not None  # _check_shapes
            self._stored[name] = int4_nbytes(rows, in_features, group_size)

    def _check_shapes(self, module: str, scheme: Scheme, found: set[str]) -> None:
        rows, in_features = self._expected[f"{module}.weight"]
        if scheme.bits == 4 and kernel_group_size(scheme.group_size, in_features) is None:
            raise UnsupportedModelError(
                f"{module} has {in_features} columns in groups of {scheme.group_size or in_features}, which no group "
                "of 32, 64 or 128 divides: use another export of the model",
                param="model",
            )
        groups = -(-in_features // (scheme.group_size or in_features))
        per_word = 32 // scheme.bits
        row_words, column_words = -(-rows // per_word), -(-in_features // per_word)
        by_channel = [(rows, 1), (rows,), (1,), (1, 1), ()]
        shapes: dict[str, tuple[list[tuple[int, ...]], tuple[str, ...]]]
        if scheme.layout == "awq":
            shapes = {
                "qweight": ([(in_features, row_words)], ("I32",)),
                "qzeros": ([(groups, row_words)], ("I32",)),
                "scales": ([(groups, rows)], FLOATING),
            }
        elif scheme.layout == "gptq":
            shapes = {
                "qweight": ([(column_words, rows)], ("I32",)),
                "qzeros": ([(groups, row_words)], ("I32",)),
                "scales": ([(groups, rows)], FLOATING),
                "g_idx": ([(in_features,)], ("I32", "I64")),
            }
        else:
            scales: list[tuple[int, ...]] = [(rows, groups)] if scheme.group_size else by_channel
            zeros = [*scales, (row_words, groups)]
            shapes = {
                "weight": ([(rows, in_features)], ("I8",)),
                "weight_packed": ([(rows, column_words)], ("I32",)),
                "weight_scale": (scales, FLOATING),
                "weight_shape": ([(2,)], ("I32", "I64")),
                "weight_zero_point": (zeros, ("I8", "I32")),
                "weight_g_idx": ([(in_features,)], ("I32", "I64")),
            }
        for suffix in sorted(found):
            allowed, dtypes = shapes[suffix]
            tensor = self._files.tensors[f"{module}.{suffix}"]
            if tensor.shape not in allowed:
                raise CheckpointError(
                    f"the tensor {module}.{suffix} has the shape {list(tensor.shape)}; config.json and its "
                    f"quantization_config make it {list(allowed[0])}",
                    param="model",
                )
            if tensor.dtype not in dtypes:
                raise CheckpointError(
                    f"the tensor {module}.{suffix} has the type {tensor.dtype}; it has to be {' or '.join(dtypes)}",
                    param="model",
                )

    def _drop_zero_biases(self) -> None:
        """AutoGPTQ writes a bias for every module it quantised, zero where the model has none."""
        if self._quantization.method != "gptq":
            return
        for weight in self._modules:
            bias = weight.removesuffix("weight") + "bias"
            if bias not in self._stored or bias in self._expected:
                continue
            if bool(self._files.read(bias).any()):
                raise CheckpointError(
                    f"the tensor {bias} is not zero, but the configuration says that there is no bias there",
                    param="model",
                )
            del self._stored[bias]

    # --- reading

    def _downward(self, module: str, scheme: Scheme, rows: int, in_features: int) -> Stored:
        """AWQ and GPTQ: matrices transposed, a row for each input."""
        words, zero_words = self._files.read(f"{module}.qweight"), self._files.read(f"{module}.qzeros")
        scales = self._finite(f"{module}.scales").t()
        if scheme.layout == "awq":
            codes, zeros = unpack_awq(words).t(), unpack_awq(zero_words).t()
        else:
            codes, zeros = unpack_down(words, scheme.bits), unpack(zero_words, scheme.bits).t()
        codes, zeros = codes[:rows, :in_features], zeros[:rows] + scheme.zero_offset
        middle = 1 << (scheme.bits - 1)
        if scheme.symmetric and bool((zeros != middle).any()):
            raise CheckpointError(
                f"the tensor {module}.qzeros has zero points other than {middle}, but quantization_config says sym; if "
                "they are stored as they are, its checkpoint_format must be gptq_v2",
                param="model",
            )
        if scheme.bits == 8:
            return Int8Channel((codes ^ 0x80).view(torch.int8).contiguous(), scales.flatten().contiguous())
        if int(zeros.max()) > 15:
            raise CheckpointError(
                f"the tensor {module}.qzeros has the zero point 16, which is none of the 4-bit codes: convert the "
                "checkpoint to gptq_v2",
                param="model",
            )
        perm = None
        if f"{module}.g_idx" in self._files.tensors:
            perm = self._order(f"{module}.g_idx", scheme, in_features)
        return self._int4(scheme, codes, scales, zeros, perm)

    def _packed(self, module: str, scheme: Scheme, rows: int, in_features: int) -> Stored:
        """compressed-tensors' pack-quantized."""
        tensors = self._files.tensors
        shape = f"{module}.weight_shape"
        if shape in tensors and self._files.read(shape).tolist() != [rows, in_features]:
            raise CheckpointError(
                f"the tensor {shape} says {self._files.read(shape).tolist()}; the configuration makes the matrix "
                f"{[rows, in_features]}",
                param="model",
            )
        codes = unpack(self._files.read(f"{module}.weight_packed"), scheme.bits)[:, :in_features]
        zeros = self._zero_points(f"{module}.weight_zero_point", scheme, rows)
        if scheme.bits == 8:
            scales = self._row_scales(f"{module}.weight_scale", rows)
            return Int8Channel((codes ^ 0x80).view(torch.int8).contiguous(), scales)
        if scheme.group_size is None:
            scales = self._row_scales(f"{module}.weight_scale", rows).unsqueeze(1)
        else:
            scales = self._finite(f"{module}.weight_scale")
        perm = None
        if f"{module}.weight_g_idx" in tensors:
            perm = self._order(f"{module}.weight_g_idx", scheme, in_features)
        return self._int4(scheme, codes, scales, zeros, perm)

    def _zero_points(self, name: str, scheme: Scheme, rows: int) -> torch.Tensor | None:
        """uint8 [rows, groups]; None where all are the middle code."""
        tensor = self._files.tensors.get(name)
        if scheme.symmetric:
            # Early versions wrote them for symmetric schemes, too: signed, so all zero.
            if tensor is not None and bool(self._files.read(name).any()):
                raise CheckpointError(
                    f"the tensor {name} is not zero, but quantization_config says symmetric", param="model"
                )
            return None
        if tensor is None:
            raise CheckpointError(
                f"the checkpoint lacks the tensor {name}, but quantization_config does not say symmetric",
                param="model",
            )
        if tensor.dtype == "I32" and len(tensor.shape) == 2 and tensor.shape[0] == -(-rows * scheme.bits // 32):
            return unpack_down(self._files.read(name), scheme.bits).t()[:rows]
        raise CheckpointError(
            f"the tensor {name} has the type {tensor.dtype} and the shape {list(tensor.shape)}; zero points have to be "
            f"packed along the rows, I32 [{-(-rows * scheme.bits // 32)}, groups]",
            param="model",
        )

    def _order(self, name: str, scheme: Scheme, in_features: int) -> torch.Tensor | None:
        """Of `g_idx`, the group of each column: which columns to read in what order, so that groups lie together.
        int32 [in_features]; None if they do already."""
        group_size = scheme.group_size or in_features
        groups = self._files.read(name).long()
        wanted = torch.arange(in_features) // group_size
        if torch.equal(groups, wanted):
            return None
        if bool((groups == -1).all()):  # compressed-tensors' way to say that there is no order
            return None
        ordered, perm = torch.sort(groups, stable=True)
        if not torch.equal(ordered, wanted):
            low, high = int(ordered[0]), int(ordered[-1])
            raise CheckpointError(
                f"the tensor {name} has groups {low} to {high} in uneven numbers; there have to be {group_size} "
                f"columns in each of the groups 0 to {int(wanted[-1])}",
                param="model",
            )
        return perm.to(torch.int32)

    def _int4(
        self,
        scheme: Scheme,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        perm: torch.Tensor | None,
    ) -> Int4Group:
        in_features = codes.shape[1]
        group_size = kernel_group_size(scheme.group_size, in_features)
        assert group_size is not None  # checked when the module was opened
        return int4_group(
            codes.contiguous() if perm is None else codes[:, perm.long()],
            scales,
            zeros,
            stored_group_size=scheme.group_size or in_features,
            group_size=group_size,
            perm=perm,
        )

    def _row_scales(self, name: str, rows: int) -> torch.Tensor:
        """float32 [rows], of one scale a row or one for all."""
        return self._finite(name).flatten().expand(rows).contiguous()

    def _finite(self, name: str) -> torch.Tensor:
        scales = self._files.read(name).float()
        bad = torch.nonzero(~torch.isfinite(scales * 256))  # no code is that far from its zero point
        if len(bad):
            raise CheckpointError(
                f"the tensor {name} has {len(bad)} scales that are not finite, or too large for weights that are, the "
                f"first at {bad[0].tolist()}: the quantisation failed, or the file is damaged",
                param="model",
            )
        return scales
