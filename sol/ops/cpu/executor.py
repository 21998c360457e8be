"""A program on the C++ backend: described once, then one call a step."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import byref, c_void_p
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from sol.ops.batch import RaggedBatch
from sol.ops.cpu import native as abi
from sol.ops.cpu.native import ALIGNMENT, Activation, Isa, KVDType, Native, OpKind
from sol.ops.program import AttentionInput, MlpInput, Moe, Op, PagedAttention, Program, ProjectResidual
from sol.ops.weights import Linear, Norm, Packed, Weight

TIMES: Final = ("embed", "attention_input", "paged_attention", "project_residual", "mlp_input", "logits", "waiting")

_ACTIVATIONS: Final = {"silu": Activation.SILU, "gelu_tanh": Activation.GELU_TANH}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """How large the KV cache is, and what it is made of."""

    dtype: KVDType
    num_blocks: int
    block_size: int
    """Tokens"""


class CpuExecutor:
    """Implements `sol.ops.program.Executor`. Owns its KV cache and threads unless it shares them; not thread-safe.

    Every matrix of the program is `Packed`; norms, biases and RoPE tables are float32. What the program's weights
    point to is kept alive. Raises `NativeError` (UNSUPPORTED for shapes that the kernels do not take), and MemoryError
    where the KV cache cannot be reserved.
    """

    def __init__(
        self,
        native: Native,
        program: Program,
        *,
        isa: Isa,
        kv_cache: KVCacheSpec,
        max_num_tokens: int,
        num_threads: int,
        cores: Sequence[int] | None = None,
        threads_of: CpuExecutor | None = None,
        cache_of: CpuExecutor | None = None,
    ) -> None:
        """`max_num_tokens`: most tokens of a step. `cores`: where each thread is pinned; None: nowhere.

        `threads_of`: computes on that executor's threads (then `num_threads` is its number, and `cores` is left out);
        the two take turns. `cache_of`: keeps its keys and values where that executor has those of its first layers; it
        has as many layers or more, and the same `kv_cache`.
        """
        self._native = native
        self._model = c_void_p()
        self.program = program
        self._keep: list[Any] = []
        num_layers = sum(isinstance(op, PagedAttention) for op in program.body)
        block = native.kv_block_nbytes(isa, kv_cache.dtype, program.num_kv_heads, program.head_dim, kv_cache.block_size)
        self.kv_cache_spec: KVCacheSpec = kv_cache
        self.num_threads: int = num_threads
        nbytes = num_layers * kv_cache.num_blocks * block
        if cache_of is None:
            self.kv_cache = _aligned(nbytes)
        else:
            assert kv_cache == cache_of.kv_cache_spec, "the same blocks of the same tokens"
            self.kv_cache = cache_of.kv_cache[:nbytes]  # layers come one after the other
        embedding, head = program.embedding, program.head
        first = next(op for op in program.body if isinstance(op, AttentionInput))
        mlp = next(op for op in program.body if isinstance(op, (MlpInput, Moe)))
        gate_up = mlp.gate_up[0] if isinstance(mlp, Moe) else mlp.gate_up
        ops = (abi.SolOp * len(program.body))(*map(self._op, program.body))
        description = abi.SolModelDesc(
            isa=isa,
            num_threads=num_threads,
            cores=self._cores(cores, num_threads),
            hidden_size=_packed(embedding).in_features,
            intermediate_size=sum(_packed(segment).rows for segment in gate_up.segments) // 2,
            vocab_size=_packed(embedding).rows,
            max_positions=first.rope.cos.shape[0],
            num_layers=num_layers,
            num_heads=program.num_heads,
            num_kv_heads=program.num_kv_heads,
            head_dim=program.head_dim,
            num_ops=len(program.body),
            kv_dtype=kv_cache.dtype,
            block_size=kv_cache.block_size,
            max_num_tokens=max_num_tokens,
            num_blocks=kv_cache.num_blocks,
            kv_cache=self.kv_cache.data_ptr(),
            kv_cache_nbytes=self.kv_cache.nbytes,
            embedding=abi.segment(_packed(embedding)),
            final_norm=self._norm(program.final_norm),
            head=self._linear(head),
            ops=ops,
            threads_of=None if threads_of is None else threads_of._model,
            embedding_scale=program.embedding_scale,
            logits_softcap=program.logits_softcap or 0.0,
        )
        self._keep += [program, ops]
        native.check(native.functions.sol_model_create(byref(description), byref(self._model)))
        self._step = native.functions.sol_model_step
        self._vocab_size: int = description.vocab_size
        self._batch = abi.SolBatch()
        self._batch_reference = byref(self._batch)
        self._logits = torch.empty((0, self._vocab_size), dtype=torch.float32)
        self._logits_address = 0

    @property
    def workspace_nbytes(self) -> int:
        """What a step needs beside weights and KV cache, taken when the executor was made."""
        count: int = self._native.functions.sol_model_workspace_nbytes(self._model)
        return count

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Logits [S, vocab_size] float32: a view of memory that the next call writes to.

        Tensors are on the CPU, int64 and contiguous, as `RaggedBatch` says; a batch that points outside of what there
        is raises `NativeError` before anything is computed.
        """
        wanted = batch.logits_rows.shape[0]
        if wanted > self._logits.shape[0]:
            self._logits = torch.empty((wanted, self._vocab_size), dtype=torch.float32)
            self._logits_address = self._logits.data_ptr()
        query_lens, seq_lens = array("q", batch.query_lens), array("q", batch.seq_lens)
        table = batch.block_table
        step = self._batch
        step.num_tokens = batch.token_ids.shape[0]
        step.num_requests, step.max_blocks = table.shape
        step.num_logits_rows = wanted
        step.token_ids = batch.token_ids.data_ptr()
        step.positions = batch.positions.data_ptr()
        step.slot_mapping = batch.slot_mapping.data_ptr()
        step.block_table = table.data_ptr()
        step.query_lens = query_lens.buffer_info()[0]
        step.seq_lens = seq_lens.buffer_info()[0]
        step.logits_rows = batch.logits_rows.data_ptr()
        code = self._step(self._model, self._batch_reference, self._logits_address)
        if code:
            self._native.check(code)
        return self._logits[:wanted]

    def trim(self) -> None:
        """Give back what only large steps need, until the next one."""
        self._logits = torch.empty((0, self._vocab_size), dtype=torch.float32)

    def times(self) -> dict[str, float]:
        """Seconds spent in each kind of work since the last call; "waiting" is the caller's at barriers.

        A mixture of experts is counted as "mlp_input".
        """
        seconds = (ctypes.c_double * len(TIMES))()
        self._native.functions.sol_model_times(self._model, seconds)
        return dict(zip(TIMES, seconds, strict=True))

    def close(self) -> None:
        """Ends the threads. The executor cannot be used any more; closing it again does nothing."""
        model, self._model = self._model, c_void_p()
        if model:
            self._native.functions.sol_model_destroy(model)

    def __del__(self) -> None:
        if hasattr(self, "_model"):
            self.close()

    def _op(self, op: Op) -> abi.SolOp:
        match op:
            case AttentionInput():
                return abi.SolOp(
                    kind=OpKind.ATTENTION_INPUT,
                    layer=op.layer,
                    norm=self._norm(op.norm),
                    linear=self._linear(op.qkv),
                    rope_cos=self._floats(op.rope.cos),
                    rope_sin=self._floats(op.rope.sin),
                    q_norm=self._norm(op.q_norm),
                    k_norm=self._norm(op.k_norm),
                )
            case PagedAttention():
                return abi.SolOp(
                    kind=OpKind.PAGED_ATTENTION,
                    layer=op.layer,
                    scale=op.scale,
                    softcap=op.softcap or 0.0,
                    window=op.window or 0,
                )
            case ProjectResidual():
                return abi.SolOp(kind=OpKind.PROJECT_RESIDUAL, norm=self._norm(op.norm), linear=self._linear(op.weight))
            case MlpInput():
                return abi.SolOp(
                    kind=OpKind.MLP_INPUT,
                    norm=self._norm(op.norm),
                    linear=self._linear(op.gate_up),
                    activation=_ACTIVATIONS[op.activation],
                )
            case Moe():
                return abi.SolOp(
                    kind=OpKind.MOE,
                    norm=self._norm(op.norm),
                    linear=self._linear(op.router),
                    num_experts=len(op.gate_up),
                    experts_per_token=op.experts_per_token,
                    normalise=op.normalise,
                    expert_gate_up=self._linears(op.gate_up),
                    expert_down=self._linears(op.down),
                )

    def _norm(self, norm: Norm | None) -> abi.SolNorm:
        if norm is None:
            return abi.SolNorm()
        return abi.SolNorm(weight=self._floats(norm.weight), eps=norm.eps, offset=norm.offset)

    def _linear(self, linear: Linear) -> abi.SolLinear:
        segments = (abi.SolSegment * len(linear.segments))(*(abi.segment(_packed(s)) for s in linear.segments))
        self._keep.append(segments)
        return abi.SolLinear(
            num_segments=len(segments),
            segments=segments,
            bias=None if linear.bias is None else self._floats(linear.bias),
        )

    def _linears(self, linears: Sequence[Linear]) -> ctypes.Array[abi.SolLinear]:
        made = (abi.SolLinear * len(linears))(*map(self._linear, linears))
        self._keep.append(made)
        return made

    def _floats(self, tensor: torch.Tensor) -> int:
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
        self._keep.append(tensor)
        return tensor.data_ptr()

    def _cores(self, cores: Sequence[int] | None, num_threads: int) -> int | None:
        if cores is None:
            return None
        assert len(cores) == num_threads
        numbers = np.array(cores, dtype=np.int32)
        self._keep.append(numbers)
        return numbers.ctypes.data


def _packed(weight: Weight) -> Packed:
    assert isinstance(weight, Packed)
    return weight


def _aligned(nbytes: int) -> torch.Tensor:
    """[nbytes] uint8, 64-byte aligned, not initialised: pages are committed when written."""
    try:
        whole = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
    except RuntimeError as error:
        raise MemoryError(str(error)) from error
    start = -whole.data_ptr() % ALIGNMENT
    return whole[start : start + nbytes]
