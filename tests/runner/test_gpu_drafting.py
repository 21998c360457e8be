"""A whole engine of the GPU's with drafters that compute, on torch's twins of the kernels: memory is planned with them,
and the tokens are those of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from arbitrary_controller import ArbitraryController
from device_reference import DeviceReferenceOps
from tiny_models import TinyLlama, save_llama

from sol import assemble
from sol.config import EngineConfig, SchedulerConfig
from sol.engine.core import EngineCore
from sol.engine.scheduler import Scheduler
from sol.engine.speculation import Speculation
from sol.engine.types import EngineInfo, EngineRequest, RequestOutput
from sol.runner import gpu
from sol.runner.gpu_runner import GpuRunner
from sol.runner.memory import MemoryPlan, allocate_kv_cache
from sol.sampling_params import SamplingParams
from sol.speculation.plan import FixedController
from sol.speculation.propose import LOOKUPS

SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "initializer_range": 0.08, "vocab_size": 320}
BLOCK, SEQS = 4, 5
WORKSPACE = 3 << 20
"""Bytes that the pretended device has lost to the trial"""
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 4},
    {"temperature": 1.0, "logprobs": 1},
]


class Card:
    """What the runner asks of CUDA, of a device that is none: memory, of which caches and weights are subtracted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.caches: list[torch.Tensor] = []
        """KV caches, in the order in which they were made"""
        self.available = self.weights = 0
        allocate = allocate_kv_cache

        def poisoned(*args: Any) -> torch.Tensor:
            # What nobody wrote is poison: reading it shows.
            self.caches.append(allocate(*args).fill_(torch.nan))
            return self.caches[-1]

        monkeypatch.setattr("sol.runner.gpu.allocate_kv_cache", poisoned)
        monkeypatch.setattr("sol.assemble_drafters.allocate_kv_cache", poisoned)
        monkeypatch.setattr(gpu, "gpu_ops", lambda device: DeviceReferenceOps())
        monkeypatch.setattr(assemble, "gpu_ops", lambda device: DeviceReferenceOps())
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self._free(), 0))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(GpuRunner, "capture", lambda runner, buckets=None: None)
        capture = GpuRunner.capture_verifying
        monkeypatch.setattr(GpuRunner, "capture_verifying", lambda runner, sizes: capture(runner, sizes, graphs=False))
        # Collected already, or held by nobody but a test.
        monkeypatch.setattr("gc.freeze", lambda: None)

    def _free(self) -> int:
        return self.available - self.weights - sum(cache.nbytes for cache in self.caches) - WORKSPACE


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


@pytest.fixture(scope="module")
def target(tiny_llama: Callable[..., TinyLlama]) -> str:
    return str(tiny_llama(**SHAPE).directory)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("small")
    return str(save_llama(folder, seed=9, **(SHAPE | {"hidden_size": 32, "num_hidden_layers": 1})).directory)


def engine_config(target: str, blocks: int = 24, **speculative: Any) -> EngineConfig:
    options: dict[str, Any] = {"speculation": "off"}
    if speculative:
        options = {"speculative_config": {"num_speculative_tokens": 4} | speculative}
    config = EngineConfig(
        model=target,
        device="cpu",
        cpu_kernels="torch",
        max_model_len=64,
        max_num_seqs=SEQS,
        max_num_batched_tokens=24,
        max_num_prefill_tokens=16,
        block_size=BLOCK,
        gpu_memory_utilization=0.3,
        skip_tokenizer_init=True,
        **options,
    )
    bytes_per_token = assemble.plan(config, progress=False).memory.kv_per_token
    return replace(config, kv_cache_memory_bytes=blocks * BLOCK * bytes_per_token)


def build(config: EngineConfig, card: Card) -> tuple[GpuRunner, assemble.EnginePlan, MemoryPlan]:
    settled = assemble.plan(config, progress=False)
    card.caches, card.available, card.weights = [], settled.memory.available, settled.memory.weights
    runner, memory, weights = assemble._build_gpu_runner(config, settled, progress=False)
    assert weights == settled.memory.weights == memory.weights
    return runner, settled, memory


def make_core(config: EngineConfig, card: Card, controller: Any = None) -> EngineCore:
    """As `build_core` joins them for a GPU, with a controller of the test's choice."""
    runner, settled, memory = build(config, card)
    speculation = None
    if runner.drafters is not None:
        names = runner.drafters.names
        caching = [name for name in names if name not in LOOKUPS]
        controller = controller or FixedController(names, 4)
        speculation = Speculation(controller, num_speculative_tokens=4, caching=caching)
    scheduler = SchedulerConfig(
        max_model_len=memory.max_model_len,
        max_num_seqs=SEQS,
        max_num_batched_tokens=24,
        max_num_prefill_tokens=16,
        block_size=BLOCK,
        num_blocks=memory.num_blocks,
        enable_prefix_caching=True,
        max_num_logits_rows=settled.max_num_logits_rows,
        num_invariant_tokens=16,
    )
    info = EngineInfo(
        model="tiny",
        device="cpu",
        dtype="float32",
        vocab_size=SHAPE["vocab_size"],
        max_model_len=memory.max_model_len,
        max_num_seqs=SEQS,
        max_num_batched_tokens=24,
        block_size=BLOCK,
        num_blocks=memory.num_blocks,
        weight_bytes=0,
        kv_cache_bytes=memory.kv_cache,
        load_seconds=0.0,
    )
    return EngineCore(Scheduler(scheduler, speculation), runner, info, work_ahead=1)


def make_requests(seed: int, count: int = 12) -> list[EngineRequest]:
    rng = random.Random(seed)
    texts = [[rng.randrange(3, 320) for _ in range(40)] for _ in range(2)]
    return [
        EngineRequest(
            request_id=f"r{index}",
            prompt_token_ids=[*rng.choice(texts)[: rng.randrange(0, 36)], rng.randrange(3, 320)],
            params=SamplingParams(max_tokens=rng.randrange(12, 28), **KINDS[index % len(KINDS)]),
            seed=index,
            eos_token_ids=[2],
        )
        for index in range(count)
    ]


def drive(core: EngineCore, requests: list[EngineRequest], seed: int = 0, aborts: float = 0.0) -> dict[str, Any]:
    """Requests arrive, and some leave, at any time; the outputs of each."""
    rng = random.Random(seed)
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    waiting = list(requests)
    while waiting or core.has_work:
        if waiting and rng.random() < 0.5:
            core.add([waiting.pop()])
        if rng.random() < aborts:
            core.abort([rng.choice(requests).request_id])
        result = core.step()
        assert not any(stats.num_failures for stats in result.stats.drafters.values())
        for output in result.outputs:
            outputs[output.request_id].append(output)
        assert core.dead is None
        core.check_integrity()
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def counted(found: dict[str, list[RequestOutput]], drafter: str) -> tuple[int, int]:
    """Drafts of all requests that were verified, and of those how many were accepted."""
    last = [outputs[-1].speculation for outputs in found.values()]
    counts = [usage.drafters[drafter] for usage in last if usage and drafter in usage.drafters]
    return sum(c.num_draft_tokens for c in counts), sum(c.num_accepted_tokens for c in counts)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_those_of_plain_decoding(target: str, small: str, card: Card, seed: int) -> None:
    """Requests share prompts, are aborted, and are preempted by a cache of 24 blocks."""
    requests = make_requests(seed)
    expected = drive(make_core(engine_config(target, blocks=90), card), requests)
    config = engine_config(target, method="suffix+draft_model+early_exit", model=small, num_exit_layers=1)
    controller = ArbitraryController(seed, drafters=["suffix", "draft_model", "early_exit"])
    found = drive(make_core(config, card, controller), requests, seed, aborts=0.03)
    for request in requests:
        wanted, got = tokens(expected[request.request_id]), found[request.request_id]
        if got[-1].finish_reason == "abort":
            wanted = wanted[: len(tokens(got))]
        assert tokens(got) == wanted
    for drafter in ("draft_model", "early_exit"):
        assert counted(found, drafter)[0] > 5


def test_a_target_accepts_its_own_drafts(target: str, card: Card) -> None:
    found = drive(make_core(engine_config(target, 90, method="draft_model", model=target), card), make_requests(7))
    drafted, accepted = counted(found, "draft_model")
    assert drafted == accepted > 80


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_drafts_with_noise_of_their_own(target: str, card: Card, method: str) -> None:
    config = engine_config(
        target, 90, method="draft_model", model=target, verify_method=method, draft_sample_method="independent"
    )
    found = drive(make_core(config, card), make_requests(3))
    drafted, accepted = counted(found, "draft_model")
    assert accepted > 0.95 * drafted > 50, "the laws are the same"


@pytest.mark.parametrize("method", ["draft_model", "early_exit"])
def test_memory_has_room_for_drafters(target: str, small: str, card: Card, method: str) -> None:
    options: dict[str, Any] = {"model": small} if method == "draft_model" else {"num_exit_layers": 1}
    if method == "draft_model":
        options |= {"verify_method": "rejection", "draft_sample_method": "independent"}
    _, settled, memory = build(engine_config(target, method=method, **options), card)
    assert memory.num_blocks == 24
    trial, final = card.caches[: len(card.caches) // 2], card.caches[len(card.caches) // 2 :]
    own = [] if method == "early_exit" else [(1, 2, 24, BLOCK, 2, 16)]
    assert [tuple(cache.shape) for cache in final] == [(2, 2, 25, BLOCK, 2, 16), *own]
    scratch = trial[0][:, :, -1:].numel() * 4
    assert sum(cache.nbytes for cache in final) == memory.kv_cache + scratch
    # A trial keeps no distributions from one step to the next.
    kept = SEQS * 4 * SHAPE["vocab_size"] * 4 if method == "draft_model" else 0
    assert settled.drafters.kept_probs == kept
    assert memory.workspace == WORKSPACE + scratch + kept
