"""The C ABI of csrc/sol_cpu.h through ctypes. Every struct and number here stands there, with its meaning."""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import platform
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sol.ops.weights import Packed

ABI_VERSION: Final = 6
LIBRARY: Final = Path(__file__).with_name("_native.so")
OVERRIDE: Final = "SOL_CPU_LIBRARY"
"""An environment variable for developers: another build of the library, e.g. an instrumented one."""
ALIGNMENT: Final = 64


class Isa(enum.IntEnum):
    """Instruction sets, by the names that `cpu_kernels` takes."""

    PORTABLE = 0
    NEON = 1
    AVX2 = 2
    AVX512 = 3
    AVX512VNNI = 4


AUTO: Final = (Isa.AVX512VNNI, Isa.AVX512, Isa.AVX2, Isa.NEON, Isa.PORTABLE)
"""What `best_isa` chooses from, best first."""


class Format(enum.IntEnum):
    F32 = 0
    F16 = 1
    BF16 = 2
    Q4_0 = 10
    Q4_1 = 11
    Q5_0 = 12
    Q5_1 = 13
    Q8_0 = 14
    Q4_K = 20
    Q5_K = 21
    Q6_K = 22
    INT8 = 30
    INT4 = 31


class KVDType(enum.IntEnum):
    FLOAT32 = 0
    FLOAT16 = 1
    INT8 = 2


class OpKind(enum.IntEnum):
    ATTENTION_INPUT = 0
    PAGED_ATTENTION = 1
    PROJECT_RESIDUAL = 2
    MLP_INPUT = 3
    MOE = 4


class Activation(enum.IntEnum):
    SILU = 0
    GELU_TANH = 1


class DraftLayout(enum.IntEnum):
    """Sizes, and where the parts of what was learned about one drafter's drafts begin."""

    SCORE_BINS = 13
    POSITIONS = 16
    SURVIVAL_BINS = 8
    SCORE_LEVELS = 258
    BY_SCORE = 0
    SCORE_PRECISION = 13
    BY_POSITION = 26
    POSITION_PRECISION = 42
    CURVE = 58
    CURVE_WEIGHT = 74
    NUM_RIGHT = 90
    HAS_CURVE = 91
    ACCEPTANCE_SIZE = 92


class NativeError(Exception):
    """The library refused; the message is its own."""

    ARGUMENT: Final = -1
    MEMORY: Final = -2
    UNSUPPORTED: Final = -3
    DATA: Final = -4

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class NativeUnavailableError(Exception):
    """There is no library that fits; the message says why and what to do."""


class SolSegment(ctypes.Structure):
    _fields_ = (
        ("format", c_int32),
        ("group_size", c_int32),
        ("rows", c_int64),
        ("cols", c_int64),
        ("packed", c_void_p),
        ("packed_nbytes", c_int64),
        ("perm", c_void_p),
    )


class SolLinear(ctypes.Structure):
    _fields_ = (
        ("num_segments", c_int32),
        ("reserved", c_int32),
        ("segments", POINTER(SolSegment)),
        ("bias", c_void_p),
    )


class SolNorm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_float), ("offset", c_float))


class SolOp(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32),
        ("layer", c_int32),
        ("norm", SolNorm),
        ("linear", SolLinear),
        ("rope_cos", c_void_p),
        ("rope_sin", c_void_p),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int32),
        ("activation", c_int32),
        ("q_norm", SolNorm),
        ("k_norm", SolNorm),
        ("num_experts", c_int32),
        ("experts_per_token", c_int32),
        ("normalise", c_int32),
        ("reserved", c_int32),
        ("expert_gate_up", POINTER(SolLinear)),
        ("expert_down", POINTER(SolLinear)),
    )


class SolModelDesc(ctypes.Structure):
    _fields_ = (
        ("isa", c_int32),
        ("num_threads", c_int32),
        ("cores", c_void_p),
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("vocab_size", c_int64),
        ("max_positions", c_int64),
        ("num_layers", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("num_ops", c_int32),
        ("kv_dtype", c_int32),
        ("block_size", c_int32),
        ("max_num_tokens", c_int32),
        ("num_blocks", c_int64),
        ("kv_cache", c_void_p),
        ("kv_cache_nbytes", c_int64),
        ("embedding", SolSegment),
        ("final_norm", SolNorm),
        ("head", SolLinear),
        ("ops", POINTER(SolOp)),
        ("threads_of", c_void_p),
        ("embedding_scale", c_float),
        ("logits_softcap", c_float),
    )


class SolBatch(ctypes.Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        ("num_requests", c_int64),
        ("num_logits_rows", c_int64),
        ("max_blocks", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("block_table", c_void_p),
        ("query_lens", c_void_p),
        ("seq_lens", c_void_p),
        ("logits_rows", c_void_p),
    )


class SolDrafts(ctypes.Structure):
    _fields_ = (
        ("num_slots", c_int64),
        ("width", c_int64),
        ("scores", c_void_p),
        ("predicted", c_void_p),
        ("expected", c_void_p),
        ("counts", c_void_p),
        ("num_drafters", c_int64),
        ("habits", c_void_p),
        ("acceptance", c_void_p),
        ("log_odds", c_void_p),
        ("bins", c_void_p),
        ("most_bin_precision", c_double),
        ("most_position_precision", c_double),
        ("most_request_precision", c_double),
        ("least_information", c_double),
        ("curve_observations", c_double),
        ("prior_drafts", c_double),
        ("unverified", c_double),
        ("most_drafts", c_double),
    )


class SolStepCosts(ctypes.Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        ("num_knots", c_int64),
        ("per_token", c_void_p),
        ("knots", c_void_p),
        ("shares", c_void_p),
        ("factors", c_void_p),
    )


_MATRIX = (c_int32, c_int32, c_int64, c_int64, c_int32)  # isa, format, rows, cols, group_size
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "sol_abi_version": (c_int32, ()),
    "sol_last_error": (c_char_p, ()),
    "sol_isa_supported": (c_int32, (c_int32,)),
    "sol_group_rows": (c_int32, (c_int32,)),
    "sol_packed_nbytes": (c_int64, _MATRIX),
    "sol_pack": (
        c_int32,
        (*_MATRIX, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64),
    ),
    "sol_check_packed": (c_int32, (*_MATRIX, c_void_p, c_int64)),
    "sol_unpack_rows": (c_int32, (c_int32, POINTER(SolSegment), c_void_p, c_int64, c_void_p)),
    "sol_kv_block_nbytes": (c_int64, (c_int32, c_int32, c_int32, c_int32, c_int32)),
    "sol_model_create": (c_int32, (POINTER(SolModelDesc), POINTER(c_void_p))),
    "sol_model_destroy": (None, (c_void_p,)),
    "sol_model_workspace_nbytes": (c_int64, (c_void_p,)),
    "sol_model_step": (c_int32, (c_void_p, POINTER(SolBatch), c_void_p)),
    "sol_model_times": (None, (c_void_p, POINTER(c_double))),
    "sol_linear": (c_int32, (c_int32, POINTER(SolLinear), c_void_p, c_int64, c_void_p)),
    "sol_choose_drafts": (
        c_int32,
        (*[c_void_p] * 4, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p),
    ),
    "sol_learn_drafts": (c_int32, (*[c_void_p] * 3, c_int64, c_double, c_double, c_void_p)),
}


class Native:
    """The loaded library. Methods raise `NativeError`; they are safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        """Raises `NativeUnavailableError`."""
        if not path.exists():
            raise NativeUnavailableError(
                "the CPU kernels were not built: install a C++17 compiler (on Debian and Ubuntu: apt-get install g++), "
                "then install Sol again"
            )
        try:
            self.functions = ctypes.CDLL(str(path))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(self.functions, name)
                function.restype = result
                function.argtypes = arguments
        except (OSError, AttributeError) as error:
            raise NativeUnavailableError(
                f"the CPU kernels in {path} cannot be loaded ({error}): install Sol again"
            ) from None
        found = self.functions.sol_abi_version()
        if found != ABI_VERSION:
            raise NativeUnavailableError(
                f"the CPU kernels in {path} are of another version of Sol (ABI {found}, not {ABI_VERSION}): install "
                "Sol again"
            )
        self.path = path

    def holding_the_lock(self, name: str) -> Any:
        """A function of the library that does not let other threads run Python meanwhile: for calls so short that to
        get the interpreter's lock back would take longer."""
        function = getattr(ctypes.PyDLL(str(self.path)), name)
        function.restype, function.argtypes = _SIGNATURES[name]
        return function

    def isas(self) -> list[Isa]:
        """Instruction sets that are built in and that this processor has."""
        return [isa for isa in Isa if self.functions.sol_isa_supported(isa) == 1]

    def best_isa(self) -> Isa:
        supported = self.isas()
        return next(isa for isa in AUTO if isa in supported)

    def group_rows(self, isa: Isa) -> int:
        return self._count(self.functions.sol_group_rows(isa))

    def packed_nbytes(self, isa: Isa, kind: Format, rows: int, cols: int, group_size: int = 0) -> int:
        return self._count(self.functions.sol_packed_nbytes(isa, kind, rows, cols, group_size))

    def kv_block_nbytes(self, isa: Isa, dtype: KVDType, num_kv_heads: int, head_dim: int, block_size: int) -> int:
        """Bytes of one block in one layer, keys and values."""
        return self._count(self.functions.sol_kv_block_nbytes(isa, dtype, num_kv_heads, head_dim, block_size))

    def pack(
        self,
        isa: Isa,
        kind: Format,
        rows: int,
        cols: int,
        group_size: int,
        data: npt.NDArray[Any],
        scales: npt.NDArray[np.float32] | None,
        zeros: npt.NDArray[np.uint8] | None,
        out: npt.NDArray[np.uint8],
    ) -> None:
        """Fills `out` [packed_nbytes]. All arrays are contiguous; see sol_pack for what they hold."""
        for array in (data, scales, zeros, out):
            assert array is None or array.flags.c_contiguous
        assert scales is None or scales.dtype == np.float32
        assert zeros is None or zeros.dtype == np.uint8
        self.check(
            self.functions.sol_pack(
                isa, kind, rows, cols, group_size,
                data.ctypes.data, data.nbytes,
                None if scales is None else scales.ctypes.data, 0 if scales is None else scales.size,
                None if zeros is None else zeros.ctypes.data, 0 if zeros is None else zeros.size,
                out.ctypes.data, out.nbytes,
            )
        )  # fmt: skip

    def check_packed(self, isa: Isa, packed: Packed) -> None:
        """Raises `NativeError` unless the packed bytes can be computed with."""
        self.check(
            self.functions.sol_check_packed(
                isa, packed.format, packed.rows, packed.in_features, packed.group_size,
                packed.data.ctypes.data, packed.data.nbytes,
            )
        )  # fmt: skip

    def unpack_rows(self, isa: Isa, packed: Packed, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Rows of a packed matrix, dequantised: [len(ids), in_features]."""
        rows = np.array(ids, dtype=np.int64)
        out = np.empty((len(rows), packed.in_features), dtype=np.float32)
        described = segment(packed)
        self.check(self.functions.sol_unpack_rows(isa, byref(described), rows.ctypes.data, len(rows), out.ctypes.data))
        return out

    def linear(
        self,
        isa: Isa,
        segments: Sequence[Packed],
        x: npt.NDArray[np.float32],
        bias: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """x [T, in_features] · Wᵀ + bias → [T, sum of rows], on one thread as a step computes it."""
        x = np.ascontiguousarray(x, dtype=np.float32)
        out = np.empty((len(x), sum(s.rows for s in segments)), dtype=np.float32)
        array = (SolSegment * len(segments))(*map(segment, segments))
        described = SolLinear(num_segments=len(segments), segments=array, bias=address(bias))
        self.check(self.functions.sol_linear(isa, byref(described), x.ctypes.data, len(x), out.ctypes.data))
        return out

    def check(self, code: int) -> None:
        """Raises `NativeError` for a negative code, with the library's message."""
        if code < 0:
            raise NativeError(code, self.functions.sol_last_error().decode("utf-8", errors="replace"))

    def _count(self, value: int) -> int:
        self.check(min(value, 0))
        return value


def segment(packed: Packed) -> SolSegment:
    """Points into `packed`, which must outlive it."""
    return SolSegment(
        format=packed.format,
        group_size=packed.group_size,
        rows=packed.rows,
        cols=packed.in_features,
        packed=packed.data.ctypes.data,
        packed_nbytes=packed.data.nbytes,
        perm=address(packed.perm),
    )


def address(array: npt.NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data


@functools.cache
def load() -> Native:
    """The library, loaded once. Raises `NativeUnavailableError` saying why there is none."""
    if platform.system() != "Linux":
        raise NativeUnavailableError(f"the CPU kernels run on Linux, and this is {platform.system()}")
    return Native(Path(os.environ.get(OVERRIDE) or LIBRARY))
