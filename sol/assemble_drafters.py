"""The part of `sol.assemble` that makes drafters which compute a model: what they need, before and after loading.

A drafter shares the target's device, block tables and threads. Its weights, its KV cache and its workspace are part of
the memory plan, so that the KV cache is sized by what is left. `model_proposers` makes drafters beside an executor of
the target's on a CPU; `GpuDrafters` makes them on a GPU, where KV caches are made twice.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from sol.config import EngineConfig
from sol.errors import ConfigError, TokenizerError
from sol.models.checkpoint import Checkpoint, open_checkpoint
from sol.models.config import ModelConfig, load_model_config
from sol.models.dummy_checkpoint import parameter_shapes
from sol.models.hub_access import HubAccess
from sol.models.packed_cache import CpuPacker, Source, packed_nbytes
from sol.models.registry import load_program
from sol.models.source import ModelFiles, resolve
from sol.ops import EagerExecutor, Executor, KVCache, Program
from sol.ops.cpu.executor import CpuExecutor, KVCacheSpec
from sol.ops.cpu.native import NativeError
from sol.ops.program import Ops
from sol.ops.reference import ReferenceOps
from sol.runner import cpu_kernels
from sol.runner.cpu_kernels import CpuKernels, choose_kernels
from sol.runner.device import resolve_dtype
from sol.runner.draft_sampling import sample_drafts
from sol.runner.gpu_runner import WARM_UP_TOKENS
from sol.runner.memory import allocate_kv_cache, kv_bytes_per_token, no_room_for_kv_cache, workspace_bytes
from sol.speculation.config import SpeculativeConfig
from sol.speculation.propose.draft_model import DraftModelProposer
from sol.speculation.propose.early_exit import EarlyExitProposer, default_exit_layers, first_layers
from sol.speculation.propose.model_drafter import ModelDrafter, SampleMany
from sol.speculation.propose.protocol import Proposer
from sol.speculation.propose.vocabulary import TokenTable, VocabularyMap, match_vocabularies
from sol.version import __version__

if TYPE_CHECKING:
    from sol.assemble import EnginePlan

logger = logging.getLogger(__name__)

_STEADY_TOKENS: Final = 2
"""What a request that is drafted for at every step needs in the first pass: its last draft and the token after it"""
_LONG_CONTEXT: Final = 1024
"""Tokens before a pass's own: enough that attention on a GPU shares them out among programs"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelPlan:
    """A second checkpoint, settled before any weights are loaded."""

    files: ModelFiles
    model: ModelConfig
    dtype: torch.dtype
    """Of weights; with the C++ kernels of those that are not kept as they are stored"""
    kernels: CpuKernels | None
    checkpoint: Checkpoint
    vocabulary: VocabularyMap


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftersPlan:
    """Model drafters and what they add to the target's memory, in bytes."""

    draft_model: DraftModelPlan | None = None
    num_exit_layers: int | None = None
    max_num_tokens: int = 0
    """Of a forward pass of the draft model"""
    weights: int = 0
    workspace: int = 0
    """`kept_probs` included"""
    kept_probs: int = 0
    """Of distributions that drafts were drawn from, kept from one step to the next: no trial of a step has them"""
    kv_per_token: int = 0


def plan_drafters(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    files: ModelFiles,
    model: ModelConfig,
    device: torch.device,
    *,
    kernels: CpuKernels | None,
    dtype: torch.dtype,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_num_prefill_tokens: int,
    progress: bool,
) -> DraftersPlan:
    """`files`, `model`, `kernels` and `dtype` are the target's. Fetches the draft model if it is not here.

    Raises `ConfigError`, or what `sol.models.source.resolve` raises.
    """
    asked = [name for name in speculative.drafters if name in ("draft_model", "early_exit")]
    tokens = weights = workspace = kept_probs = kv_per_token = 0
    draft: DraftModelPlan | None = None
    if "draft_model" in asked:
        draft = _plan_draft_model(config, speculative, files, model, device, progress=progress)
        tokens = min(max_num_prefill_tokens, max_num_batched_tokens) + _STEADY_TOKENS * max_num_seqs
        matrix_dtype = None if config.dtype == "auto" else draft.dtype
        shapes = parameter_shapes(draft.model)
        if draft.kernels is None:
            weights = sum(math.prod(shape) for shape in shapes.values()) * draft.dtype.itemsize
            kv_per_token = kv_bytes_per_token(draft.model, draft.dtype)
        else:
            native, isa = draft.kernels.native, draft.kernels.isa
            weights = packed_nbytes(native, isa, shapes, draft.checkpoint, matrix_dtype)
            kv_per_token = draft.kernels.kv_bytes_per_token(draft.model, config.block_size)
        workspace += _workspace(draft.model, draft.kernels, draft.dtype, tokens, max_num_seqs)
        workspace += _carried_over(draft.vocabulary, max_num_seqs)
    exit_layers: int | None = None
    if "early_exit" in asked:
        exit_layers = speculative.num_exit_layers or default_exit_layers(model.num_hidden_layers)
        if exit_layers >= model.num_hidden_layers:
            raise ConfigError(
                f"speculative_config.num_exit_layers is {exit_layers}, but the model has {model.num_hidden_layers} "
                f"layers: it must be less",
                param="speculative_config",
            )
        workspace += _workspace(model, kernels, dtype, max_num_seqs, max_num_seqs)
    if asked and speculative.draft_sample_method == "independent":
        # The distributions that drafts were drawn from are kept until they are verified.
        kept_probs = max_num_seqs * speculative.num_speculative_tokens * model.vocab_size * torch.float32.itemsize
    return DraftersPlan(
        draft_model=draft,
        num_exit_layers=exit_layers,
        max_num_tokens=tokens,
        weights=weights,
        workspace=workspace + kept_probs,
        kept_probs=kept_probs,
        kv_per_token=kv_per_token,
    )


def model_proposers(settled: EnginePlan, executor: Executor, *, progress: bool) -> tuple[list[Proposer], int]:
    """The drafters, ready: weights loaded, their largest pass run once; and the bytes of their weights.

    `executor` is the target's. Raises `ConfigError`, `CheckpointError`, `OutOfMemoryError`.
    """
    plan = settled.drafters
    draft = exits = None
    weight_bytes = 0
    if plan.draft_model is not None:
        draft, weight_bytes = _load(settled, plan.draft_model, executor, progress=progress)
    if plan.num_exit_layers is not None:
        exits = _exit(settled, executor, plan.num_exit_layers)
    return list(_ready(settled, draft, exits, settled.memory.num_blocks)), weight_bytes


class GpuDrafters:
    """The model drafters of a GPU, for each KV cache that the target gets: the one of the trial and the final one.

    Loads the draft model, once. `ops` makes ops for one program each. Raises `ConfigError`, `CheckpointError`.

    Drafters compute op by op on the target's stream, between its graphs, when the step is read after which they draft.
    The order of the stream is all that keeps the two apart, and it is enough:

    - The scheduler plans nothing behind a step after which somebody writes ahead, so as a rule no step is under way
      when they run. If one is, because the requests to be waited for have left, it has no token of a request that is
      drafted for: the runner drafts for none that left or was preempted in that step's plan. So the drafter and the
      step write to different blocks.
    - A block goes to somebody else in a later plan only, so its new owner writes to it later in the stream. Of a draft
      model's cache nothing is believed but the tokens that were written (`ComputedBlocks`), and its books are kept in
      the order in which passes are started.
    - `early_exit` writes the target's cache from the last token on. The request's next step writes the same places as
      the target does before it reads them; nobody else reads them, since published blocks hold computed tokens only.
    - Logits and inputs of graphs lie in the graphs' own memory, of which a drafter's pass is given nothing. A drafter
      has ops of its own, because ops keep counters and unfinished norms from one launch to the next.
    """

    def __init__(self, settled: EnginePlan, target: Program, ops: Callable[[], Ops], *, progress: bool) -> None:
        self._settled, self._target, self._ops = settled, target, ops
        self._program: Program | None = None
        draft = settled.drafters.draft_model
        if draft is not None:
            load = _loader(settled, draft, progress=progress)
            self._program = load(dtype=draft.dtype, device=settled.device)

    @property
    def weight_bytes(self) -> int:
        """That were loaded besides the target's"""
        return 0 if self._program is None else self._program.weight_bytes

    def make(self, kv_cache: KVCache) -> list[Proposer]:
        """Drafters, ready, for a target with this cache, whose last block is no request's. A draft model gets a cache
        of as many blocks less one: its passes have no padding that would have to be written somewhere.

        Raises `ConfigError`, `OutOfMemoryError`, `torch.OutOfMemoryError`.
        """
        plan, memory = self._settled.drafters, self._settled.memory
        num_blocks = kv_cache.num_blocks - 1
        draft = exits = None
        if plan.draft_model is not None:
            assert self._program is not None
            own = replace(memory, num_blocks=num_blocks)
            data = allocate_kv_cache(own, plan.draft_model.model, plan.draft_model.dtype, self._settled.device)
            draft = EagerExecutor(self._program, self._ops(), KVCache(data))
        if plan.num_exit_layers is not None:
            exits = EagerExecutor(first_layers(self._target, plan.num_exit_layers), self._ops(), kv_cache)
        drafters = _ready(self._settled, draft, exits, num_blocks, sample_drafts)
        for drafter in drafters:  # for the trial's cache as well: the modules of kernels take memory
            _warm_up(drafter, self._settled.max_num_seqs, num_blocks)
        return list(drafters)


def _warm_up(drafter: ModelDrafter, max_num_seqs: int, num_blocks: int) -> None:
    """Passes of the sizes for which a GPU's kernels are compiled anew: that takes seconds, which no request should."""
    for num_tokens in WARM_UP_TOKENS:
        drafter.rehearse([num_tokens], num_blocks)
        for context in (0, _LONG_CONTEXT):
            drafter.rehearse([1] * min(num_tokens, max_num_seqs), num_blocks, context=context)


def _ready(
    settled: EnginePlan,
    draft: Executor | None,
    exits: Executor | None,
    num_blocks: int,
    sample_many: SampleMany | None = None,
) -> list[ModelDrafter]:
    """Drafters on these executors that have run their largest pass."""
    plan, speculative, memory = settled.drafters, settled.speculative, settled.memory
    drafters: list[ModelDrafter] = []
    if draft is not None:
        assert plan.draft_model is not None
        drafters.append(
            DraftModelProposer(
                draft,
                plan.draft_model.vocabulary,
                num_blocks=num_blocks,
                block_size=memory.block_size,
                max_positions=_draft_positions(settled, plan.draft_model),
                max_num_tokens=plan.max_num_tokens,
                sample_method=speculative.draft_sample_method,
                device=settled.device,
                sample_many=sample_many,
            )
        )
    if exits is not None:
        drafters.append(
            EarlyExitProposer(
                exits,
                block_size=memory.block_size,
                max_positions=memory.max_model_len,
                max_num_tokens=settled.max_num_seqs,
                sample_method=speculative.draft_sample_method,
                device=settled.device,
                sample_many=sample_many,
            )
        )
    for drafter in drafters:
        try:
            drafter.run_worst_case(settled.max_num_seqs, num_blocks)
        except FloatingPointError as error:
            raise ConfigError(f"{error}. Use another draft model or dtype", param="speculative_config") from error
        drafter.trim()
    return drafters


def _draft_positions(settled: EnginePlan, draft: DraftModelPlan) -> int:
    return min(draft.model.max_position_embeddings, settled.memory.max_model_len)


def _loader(settled: EnginePlan, draft: DraftModelPlan, *, progress: bool) -> Callable[..., Program]:
    """`load_program` of the draft model; who calls it says which dtype and where."""
    max_positions = _draft_positions(settled, draft)
    if max_positions < settled.memory.max_model_len:
        logger.info(
            "the draft model was made for %d tokens, the target takes %d: longer requests it does not draft for",
            max_positions,
            settled.memory.max_model_len,
        )
    return functools.partial(
        load_program, draft.model, draft.checkpoint, max_positions=max_positions, progress=progress
    )


def _plan_draft_model(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    target_files: ModelFiles,
    target: ModelConfig,
    device: torch.device,
    *,
    progress: bool,
) -> DraftModelPlan:
    assert speculative.model is not None, "speculative_config() sees to it"
    # A format that was asked for is the target's; random weights are for both.
    files = resolve(
        speculative.model,
        load_format="dummy" if config.load_format == "dummy" else "auto",
        access=HubAccess(token=config.hf_token, offline=config.offline),
        progress=progress,
    )
    model = load_model_config(files)
    quantized = config.dtype == "auto" and model.quantization is not None
    return DraftModelPlan(
        files=files,
        model=model,
        dtype=resolve_dtype(config.dtype, device, model.torch_dtype),
        kernels=choose_kernels(config, device, quantized=quantized),
        checkpoint=open_checkpoint(files, None),
        vocabulary=_vocabulary(target_files, files, target.vocab_size, model.vocab_size),
    )


def _load(settled: EnginePlan, draft: DraftModelPlan, target: Executor, *, progress: bool) -> tuple[Executor, int]:
    """The draft model on the target's backend, with a KV cache of its own for as many blocks."""
    memory = settled.memory
    load = _loader(settled, draft, progress=progress)
    if draft.kernels is None:
        program = load(dtype=draft.dtype, device=settled.device)
        kv_cache = KVCache(allocate_kv_cache(memory, draft.model, draft.dtype, settled.device))
        return EagerExecutor(program, ReferenceOps(), kv_cache), program.weight_bytes
    assert isinstance(target, CpuExecutor), "both models are on the same kernels"
    native, isa = draft.kernels.native, draft.kernels.isa
    matrix_dtype = draft.dtype if settled.converts_weights else None
    with CpuPacker(native, isa, Source(draft.files) if matrix_dtype is None else None, version=__version__) as packer:
        program = load(dtype=torch.float32, packer=packer, matrix_dtype=matrix_dtype)
    try:
        executor = CpuExecutor(
            native,
            program,
            isa=isa,
            kv_cache=KVCacheSpec(
                dtype=draft.kernels.kv_dtype, num_blocks=memory.num_blocks, block_size=memory.block_size
            ),
            max_num_tokens=settled.drafters.max_num_tokens,
            num_threads=target.num_threads,
            threads_of=target,
        )
    except NativeError as error:
        raise cpu_kernels.as_config_error(error) from error
    except MemoryError as error:
        raise no_room_for_kv_cache(memory, error) from error
    return executor, program.weight_bytes


def _exit(settled: EnginePlan, target: Executor, num_layers: int) -> Executor:
    """The target's first layers over its own weights and KV cache."""
    if isinstance(target, EagerExecutor):
        return EagerExecutor(first_layers(target.program, num_layers), target.ops, target.kv_cache)
    assert isinstance(target, CpuExecutor)
    assert settled.kernels is not None
    return CpuExecutor(
        settled.kernels.native,
        first_layers(target.program, num_layers),
        isa=settled.kernels.isa,
        kv_cache=target.kv_cache_spec,
        max_num_tokens=settled.max_num_seqs,
        num_threads=target.num_threads,
        threads_of=target,
        cache_of=target,
    )


def _workspace(
    model: ModelConfig, kernels: CpuKernels | None, dtype: torch.dtype, max_num_tokens: int, max_num_seqs: int
) -> int:
    if kernels is None:
        return workspace_bytes(model, dtype, max_num_tokens, max_num_seqs)
    return cpu_kernels.workspace_bytes(model, max_num_tokens, max_num_seqs)


def _carried_over(vocabulary: VocabularyMap, max_num_seqs: int) -> int:
    """Logits in the target's ids, and what picking makes of them."""
    return 4 * max_num_seqs * vocabulary.target_size * torch.float32.itemsize


def _vocabulary(target: ModelFiles, draft: ModelFiles, target_size: int, draft_size: int) -> VocabularyMap:
    """Raises `ConfigError`."""
    from sol.text.tokenizer import Tokenizer  # who has no draft model needs no tokenizer in this process

    def table(files: ModelFiles) -> TokenTable | None:
        if files.gguf is None and files.tokenizer_json is None:
            return None
        try:
            tokenizer = Tokenizer.from_files(files)
        except TokenizerError as error:  # a target whose requests come as token ids need not have one
            logger.warning("%s: its tokenizer tells nothing about the draft model's tokens: %s", files.name, error)
            return None
        plain: dict[int, bytes] = {}
        special: dict[int, str] = {}
        for token_id in range(tokenizer.vocab_size):
            name = tokenizer.id_to_token(token_id)
            if token_id in tokenizer.special_ids:
                special[token_id] = name
            elif name:
                plain[token_id] = tokenizer.token_bytes(token_id)
        roles: Mapping[str, int | None] = {
            "bos": tokenizer.bos_token_id,
            "eos": next(iter(tokenizer.eos_token_ids), None),
        }
        return TokenTable(plain, special, {role: found for role, found in roles.items() if found is not None})

    first = table(target)
    same = (
        first is not None
        and target.tokenizer_json is not None
        and draft.tokenizer_json is not None
        and target.tokenizer_json.read_bytes() == draft.tokenizer_json.read_bytes()
    )
    return match_vocabularies(first, first if same else table(draft), target_size=target_size, draft_size=draft_size)
