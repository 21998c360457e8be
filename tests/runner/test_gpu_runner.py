"""The runner that does not wait, on torch's twins of its kernels: the tokens are those of the runner that does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from arbitrary_controller import ArbitraryController
from device_reference import DeviceReferenceOps
from recorded_proposer import RecordedProposer

from sol.config import SchedulerConfig
from sol.engine.core import EngineCore
from sol.engine.scheduler import Scheduler
from sol.engine.speculation import Speculation
from sol.engine.types import EngineInfo, EngineRequest, RequestOutput
from sol.ops import Dense, EagerExecutor, KVCache, Linear, Norm, Program, Rope
from sol.ops.program import AttentionInput, MlpInput, PagedAttention, ProjectResidual
from sol.ops.reference import ReferenceOps
from sol.runner.decode_graphs import LARGEST, decode_buckets
from sol.runner.drafters import Drafters
from sol.runner.gpu_runner import GpuRunner
from sol.runner.model_runner import ModelRunner, worst_drafts
from sol.runner.verify_graphs import Size, verify_buckets
from sol.sampling_params import SamplingParams
from sol.speculation.plan import FixedController
from sol.speculation.propose import Proposal, ProposalRow

VOCAB, HIDDEN, HEADS, KV_HEADS, SIZE, LAYERS, BLOCK = 97, 32, 4, 2, 8, 2, 4
CPU = torch.device("cpu")
CONFIG = SchedulerConfig(
    max_model_len=64,
    max_num_seqs=5,
    max_num_batched_tokens=24,
    max_num_prefill_tokens=16,
    block_size=BLOCK,
    num_blocks=30,
    enable_prefix_caching=True,
)


@pytest.fixture(scope="module")
def program() -> Program:
    generator = torch.Generator().manual_seed(3)

    def matrix(rows: int, columns: int) -> Linear:
        return Linear((Dense(torch.randn(rows, columns, generator=generator) * 1.5 * columns**-0.5),))

    angles = torch.outer(torch.arange(64).float(), 0.5 ** torch.arange(SIZE // 2).float())
    rope = Rope(cos=angles.cos(), sin=angles.sin())
    norm = Norm(torch.ones(HIDDEN), 1e-5)
    body: list[Any] = []
    for layer in range(LAYERS):
        body += [
            AttentionInput(layer=layer, norm=norm, qkv=matrix((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN), rope=rope),
            PagedAttention(layer=layer, scale=SIZE**-0.5),
            ProjectResidual(matrix(HIDDEN, HEADS * SIZE)),
            MlpInput(norm=norm, gate_up=matrix(2 * HIDDEN, HIDDEN)),
            ProjectResidual(matrix(HIDDEN, HIDDEN)),
        ]
    return Program(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        embedding=Dense(torch.randn(VOCAB, HIDDEN, generator=generator)),
        body=tuple(body),
        final_norm=norm,
        head=matrix(VOCAB, HIDDEN),
    )


def make_cache(num_blocks: int) -> KVCache:
    # What nobody wrote is poison: reading it shows.
    return KVCache(torch.full((LAYERS, 2, num_blocks, BLOCK, KV_HEADS, SIZE), torch.nan))


def gpu_runner(program: Program, config: SchedulerConfig, **options: Any) -> GpuRunner:
    return GpuRunner(
        program,
        DeviceReferenceOps(),
        make_cache(config.num_blocks + 1),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        device=CPU,
        **options,
    )


def model_runner(program: Program, config: SchedulerConfig) -> ModelRunner:
    executor = EagerExecutor(program, ReferenceOps(), make_cache(config.num_blocks))
    return ModelRunner(executor, block_size=BLOCK, num_blocks=config.num_blocks, device=CPU)


def make_core(
    runner: Any, config: SchedulerConfig, work_ahead: int, speculation: Speculation | None = None, **options: Any
) -> EngineCore:
    info = EngineInfo(
        model="tiny",
        device="cpu",
        dtype="float32",
        vocab_size=VOCAB,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=BLOCK,
        num_blocks=config.num_blocks,
        weight_bytes=0,
        kv_cache_bytes=0,
        load_seconds=0.0,
    )
    return EngineCore(Scheduler(config, speculation), runner, info, work_ahead=work_ahead, **options)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "max_tokens": 1},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.0, "frequency_penalty": 0.7},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 1.0, "min_tokens": 4, "stop_token_ids": list(range(0, 90, 3))},
    {"temperature": 1.0, "stop_token_ids": list(range(0, 90, 5))},
    {"temperature": 1.0, "logit_bias": {7: 4.0}},
    {"temperature": 1.0, "prompt_logprobs": 3},
]


def make_requests(seed: int, count: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    texts = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(2)]
    requests = []
    for index in range(count):
        prompt = [*rng.choice(texts)[: rng.randrange(0, 36)], rng.randrange(VOCAB)]
        params = SamplingParams(**({"max_tokens": rng.randrange(4, 24)} | KINDS[(seed + index) % len(KINDS)]))
        requests.append(
            EngineRequest(request_id=f"r{index}", prompt_token_ids=prompt, params=params, seed=index, eos_token_ids=[1])
        )
    return requests


def drive(core: EngineCore, requests: list[EngineRequest], seed: int) -> dict[str, list[RequestOutput]]:
    """Requests arrive and are aborted at any time; what each gets. Times differ with `work_ahead`, so aborts do."""
    rng = random.Random(seed)
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    waiting = list(requests)
    while waiting or core.has_work:
        if waiting and rng.random() < 0.5:
            core.add([waiting.pop()])
        if rng.random() < 0.04:
            core.abort([rng.choice(requests).request_id])
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
        assert core.dead is None
        core.check_integrity()
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def answer(program: Program, request: EngineRequest) -> list[RequestOutput]:
    """What the runner that waits gives a request that is alone."""
    core = make_core(model_runner(program, CONFIG), CONFIG, 0)
    core.add([request])
    outputs = []
    while core.has_work:
        outputs += core.step().outputs
    return outputs


@pytest.mark.parametrize("drafting", ["never", "arbitrary", "always graphs"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("work_ahead", [0, 1])
def test_tokens_are_those_of_the_runner_that_waits(program: Program, seed: int, work_ahead: int, drafting: str) -> None:
    requests = make_requests(seed, 14)
    answers = {request.request_id: answer(program, request) for request in requests}
    drafters, speculation = None, None
    if drafting != "never":
        known = {name: tokens(outputs) for name, outputs in answers.items()}
        drafters = Drafters([RecordedProposer(known, VOCAB, right=0.8, seed=seed)], vocab_size=VOCAB)
        controller: Any = FixedController(["suffix"], 6)
        if drafting.startswith("arbitrary"):
            controller = ArbitraryController(seed, drafters=["suffix"])
        # As if it wrote ahead: blocks are given before they are needed.
        caching = ["suffix"] if seed % 2 else []
        speculation = Speculation(controller, num_speculative_tokens=6, caching=caching)
    runner = gpu_runner(program, CONFIG, drafters=drafters)
    if drafting.endswith("graphs"):
        runner.capture_verifying(verify_buckets(CONFIG.max_num_seqs, 6), graphs=False)
    # A cache of 30 blocks lets requests be preempted; alone, each has its own.
    core = make_core(runner, CONFIG, work_ahead, speculation)
    found = drive(core, requests, seed)
    assert speculation is None or speculation.failure is None
    if drafting.startswith("always"):
        accepted = [o.speculation.drafters for outputs in found.values() for o in outputs if o.speculation]
        assert sum(counts.num_accepted_tokens for by_name in accepted for counts in by_name.values()) > 30
    for request in requests:
        wanted, got = answers[request.request_id], found[request.request_id]
        if got[-1].finish_reason == "abort":
            assert tokens(got) == tokens(wanted)[: len(tokens(got))]
            continue
        assert (tokens(got), got[-1].finish_reason) == (tokens(wanted), wanted[-1].finish_reason)
        if request.params.logprobs is not None:
            values = [p.logprob for o in got for p in o.logprobs or []]
            assert values == pytest.approx([p.logprob for o in wanted for p in o.logprobs or []], abs=1e-4)
        if request.params.prompt_logprobs is not None:
            (values,) = [[p.logprob for p in o.prompt_logprobs] for o in got if o.prompt_logprobs is not None]
            (others,) = [[p.logprob for p in o.prompt_logprobs] for o in wanted if o.prompt_logprobs is not None]
            assert values == pytest.approx(others, abs=1e-4)


def test_a_row_that_is_not_a_number_fails_alone(program: Program) -> None:
    runner = gpu_runner(program, CONFIG)
    core = make_core(runner, CONFIG, 1)
    core.add([EngineRequest(request_id="good", prompt_token_ids=[5, 6], params=SamplingParams(max_tokens=9), seed=1)])
    core.add([EngineRequest(request_id="bad", prompt_token_ids=[7] * 9, params=SamplingParams(max_tokens=9), seed=1)])
    last = {}
    for number in range(100):
        if number == 3:  # the second block of the second request
            runner._kv_cache.data[:, :, runner._rows["bad"].held.block_ids[1]] = torch.nan
        for output in core.step().outputs:
            if output.finish_reason is not None:
                last[output.request_id] = output
        if not core.has_work:
            break
    assert last["good"].finish_reason == "length"
    assert "not finite" in (last["bad"].error or "")


def test_the_worst_case_runs_and_leaves_nothing(program: Program) -> None:
    runner = gpu_runner(program, CONFIG, max_num_logits_rows=17)
    runner.run_worst_case()
    core = make_core(runner, CONFIG, 1)
    assert [o[-1].finish_reason for o in drive(core, make_requests(2, 3), 2).values()]


@pytest.mark.parametrize(("seqs", "length", "blocks"), [(1, 8, 2), (3, 8, 2), (5, 64, 30)])
def test_the_largest_verifying_step_is_one_that_there_can_be(
    program: Program, seqs: int, length: int, blocks: int
) -> None:
    plan = worst_drafts(seqs, 17, length, BLOCK)
    counts = plan.num_scheduled_tokens.values()
    assert sum(counts) == min(17, seqs * length)
    assert max(counts) <= length
    config = replace(CONFIG, max_num_seqs=seqs, max_model_len=length, num_blocks=blocks)
    gpu_runner(program, config, max_num_logits_rows=17).run_worst_case()


def test_nobody_drafts_for_another_request_of_the_same_name(program: Program) -> None:
    """A step is read while the next one is submitted, which has a new request under the name of one that left."""

    class Watching(RecordedProposer):
        def propose(self, rows: Sequence[ProposalRow]) -> list[Proposal]:
            assert all(row.sampling.output_token_ids for row in rows), "nothing was emitted"
            return super().propose(rows)

    def request(name: str, prompt: list[int], **params: Any) -> EngineRequest:
        return EngineRequest(
            request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=12, **params), seed=1
        )

    by_host = request("by host", [1, 2], logprobs=1)
    first, second = request("same", [3, 4]), request("same", list(range(5, 25)))
    known = {by_host.request_id: tokens(answer(program, by_host)), "same": tokens(answer(program, second))}
    drafters = Drafters([Watching(known, VOCAB, right=0.8, seed=0)], vocab_size=VOCAB)
    runner = gpu_runner(program, CONFIG, drafters=drafters)
    controller = FixedController(["suffix"], 6)
    core = make_core(runner, CONFIG, 1, Speculation(controller, num_speculative_tokens=6))
    core.add([by_host, first])
    core.step()
    core.abort(["same"])
    core.add([second])
    outputs: dict[str, list[RequestOutput]] = {"by host": [], "same": []}
    failed = 0
    while core.has_work:
        output = core.step()
        failed += sum(stats.num_failures for stats in output.stats.drafters.values())
        for one in output.outputs:
            outputs[one.request_id].append(one)
    assert not failed
    assert [o.finish_reason for o in outputs["same"] if o.finish_reason] == ["abort", "length"]
    assert {name: tokens(got) for name, got in outputs.items()} == known


def test_sizes_of_graphs_that_verify() -> None:
    assert verify_buckets(1, 3) == [Size(1, 2), Size(1, 3), Size(1, 4)]
    sizes = verify_buckets(256, 16)
    assert len(sizes) < 45
    for requests in range(1, 17):  # with drafts, but within the steps that compute every token as if it were alone
        for tokens in range(requests + 1, 17):
            longest = tokens - requests + 1
            found = [s for s in sizes if s.num_requests >= requests and s.num_tokens >= tokens and s.longest >= longest]
            assert min(size.num_tokens for size in found) <= 16
    for requests in range(17, 65):
        for tokens in range(requests + 1, min(129, 4 * requests + 1)):
            assert any(size.num_requests >= requests and size.num_tokens >= tokens for size in sizes)


def test_sizes_of_graphs() -> None:
    assert decode_buckets(1) == [1]
    assert decode_buckets(5) == [1, 2, 4, 5]
    assert decode_buckets(20) == [1, 2, 4, 8, 16, 20]
    assert decode_buckets(256)[-3:] == [240, 248, 256]
    assert decode_buckets(4096)[-1] == LARGEST
