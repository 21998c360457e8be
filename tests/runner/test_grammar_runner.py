"""Grammars in engines of both runners: whatever else goes on, a request's tokens are those it gets alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from arbitrary_controller import ArbitraryController
from recorded_proposer import RecordedProposer
from test_gpu_runner import BLOCK, CONFIG, CPU, VOCAB, drive, gpu_runner, make_cache, make_core, program, tokens
from tiny_grammar import EOS, NUMBER, RECORD, WORDS, compiler, text

from sol.config import SchedulerConfig
from sol.engine.speculation import Speculation
from sol.engine.types import EngineRequest, RequestOutput
from sol.errors import RequestError
from sol.grammar import Grammar
from sol.ops import EagerExecutor, Program
from sol.ops.reference import ReferenceOps
from sol.runner.drafters import Drafters
from sol.runner.model_runner import ModelRunner
from sol.sampling.grammar import Matcher
from sol.sampling_params import SamplingParams
from sol.speculation.plan import FixedController

__all__ = ["program"]

KINDS: list[dict[str, Any]] = [
    {"grammar": RECORD, "temperature": 0.0},
    {"grammar": RECORD, "temperature": 1.0},
    {"grammar": NUMBER, "temperature": 1.0, "min_tokens": 3},
    {"grammar": WORDS, "temperature": 1.0, "logprobs": 2},
    {"grammar": WORDS, "temperature": 0.0, "frequency_penalty": 0.7},
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"grammar": WORDS, "temperature": 1.0, "ignore_eos": True},
]


def make_requests(seed: int, count: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    return [
        EngineRequest(
            request_id=f"r{index}",
            prompt_token_ids=[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 24))],
            params=SamplingParams(**({"max_tokens": 36} | KINDS[(seed + index) % len(KINDS)])),
            seed=index,
            eos_token_ids=[EOS],
        )
        for index in range(count)
    ]


def waiting_runner(program: Program, config: SchedulerConfig, **options: Any) -> ModelRunner:
    executor = EagerExecutor(program, ReferenceOps(), make_cache(config.num_blocks))
    return ModelRunner(executor, block_size=BLOCK, num_blocks=config.num_blocks, device=CPU, **options)


def run(runner: Any, config: SchedulerConfig, request: EngineRequest) -> list[RequestOutput]:
    core = make_core(runner, config, 0, grammars=compiler())
    if request.params.grammar is not None:
        core.check_grammar(request.params.grammar)
    core.add([request])
    outputs = []
    while core.has_work:
        outputs += core.step().outputs
    return outputs


def check_text(request: EngineRequest, outputs: list[RequestOutput]) -> None:
    """It is in the grammar, and its end is the grammar's."""
    grammar, found = request.params.grammar, tokens(outputs)
    if grammar is None:
        return
    body = found[:-1] if found[-1] == EOS else found
    matcher = compiler().compile(grammar)
    assert matcher.consume_tokens(body), text(body)
    reason = outputs[-1].finish_reason
    assert (reason == "stop") is (found[-1] == EOS)
    if reason == "stop":
        assert matcher.is_accepting()
        assert len(found) > request.params.min_tokens or matcher.is_stopped()


@pytest.mark.parametrize("drafting", ["never", "arbitrary", "always"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["waits", "device", "device ahead"])
def test_tokens_are_those_of_a_request_alone(program: Program, kind: str, seed: int, drafting: str) -> None:
    requests, grammars = make_requests(seed, 14), compiler()
    answers = {
        r.request_id: run(waiting_runner(program, CONFIG, grammars=grammars.compile), CONFIG, r) for r in requests
    }
    for request in requests:
        check_text(request, answers[request.request_id])
    drafters, speculation = None, None
    if drafting != "never":
        known = {name: tokens(outputs) for name, outputs in answers.items()}
        drafters = Drafters([RecordedProposer(known, VOCAB, right=0.8, seed=seed)], vocab_size=VOCAB)
        controller: Any = FixedController(["suffix"], 6)
        if drafting == "arbitrary":
            controller = ArbitraryController(seed, drafters=["suffix"])
        speculation = Speculation(controller, num_speculative_tokens=6)
    make = waiting_runner if kind == "waits" else gpu_runner
    # A cache in which requests are preempted, and found again with what they had generated.
    config = replace(CONFIG, num_blocks=20)
    runner = make(program, config, drafters=drafters, grammars=grammars.compile)
    core = make_core(runner, config, int(kind == "device ahead"), speculation, grammars=grammars)
    found = drive(core, requests, seed)
    assert speculation is None or speculation.failure is None
    for request in requests:
        wanted, got = answers[request.request_id], found[request.request_id]
        if got[-1].finish_reason == "abort":
            assert tokens(got) == tokens(wanted)[: len(tokens(got))]
            continue
        assert (tokens(got), got[-1].finish_reason) == (tokens(wanted), wanted[-1].finish_reason)
        if request.params.logprobs is not None:
            values = [p.logprob for o in got for p in o.logprobs or []]
            assert values == pytest.approx([p.logprob for o in wanted for p in o.logprobs or []], abs=1e-4)
    if drafting == "always":
        counts = [
            c for outputs in found.values() for o in outputs if o.speculation for c in o.speculation.drafters.values()
        ]
        assert sum(c.num_accepted_tokens for c in counts) > 30


@pytest.mark.parametrize("device", [False, True], ids=["waits", "device"])
def test_choices_of_one_prompt_go_their_own_ways(program: Program, device: bool) -> None:
    grammars = compiler()
    make = gpu_runner if device else waiting_runner
    core = make_core(make(program, CONFIG, grammars=grammars.compile), CONFIG, int(device), grammars=grammars)
    params = SamplingParams(grammar=WORDS, temperature=1.5, max_tokens=12)
    requests = [
        EngineRequest(
            request_id=f"{i}", prompt_token_ids=[9, 8, 7], params=params, seed=5, choice_index=i, eos_token_ids=[EOS]
        )
        for i in range(4)
    ]
    core.check_grammar(WORDS)
    found = {}
    core.add(requests)
    while core.has_work:
        for output in core.step().outputs:
            found.setdefault(output.request_id, []).append(output)
    for request in requests:
        check_text(request, found[request.request_id])
    assert len({tuple(tokens(outputs)) for outputs in found.values()}) > 1


@pytest.mark.parametrize("device", [False, True], ids=["waits", "device"])
def test_a_grammar_that_fails_on_the_way_ends_its_request_alone(program: Program, device: bool) -> None:
    """The compiler keeps what the engine had compiled; here it has lost it."""
    grammars = compiler()

    def compile_some(grammar: Grammar) -> Matcher:
        if grammar == NUMBER:
            raise RequestError("out of luck")
        return grammars.compile(grammar)

    make = gpu_runner if device else waiting_runner
    core = make_core(make(program, CONFIG, grammars=compile_some), CONFIG, int(device), grammars=grammars)
    for grammar in (NUMBER, RECORD):
        core.check_grammar(grammar)
        core.add(
            [
                EngineRequest(
                    request_id=grammar.kind,
                    prompt_token_ids=[9, 8],
                    params=SamplingParams(grammar=grammar, max_tokens=40),
                    seed=1,
                    eos_token_ids=[EOS],
                )
            ]
        )
    last = {}
    while core.has_work:
        for output in core.step().outputs:
            last[output.request_id] = output
        core.check_integrity()
    assert (last["regex"].finish_reason, last["regex"].error) == ("error", "out of luck")
    assert last["json_schema"].error is None


def test_drafts_are_cut_where_the_grammar_forbids_them(program: Program) -> None:
    """A drafter that is always wrong costs the target no row of logits."""
    grammars = compiler()
    wrong = RecordedProposer({"r": [0] * 40}, VOCAB, right=1.0, seed=0)
    drafters = Drafters([wrong], vocab_size=VOCAB)
    runner = waiting_runner(program, CONFIG, drafters=drafters, grammars=grammars.compile)
    speculation = Speculation(FixedController(["suffix"], 6), num_speculative_tokens=6)
    core = make_core(runner, CONFIG, 0, speculation, grammars=grammars)
    core.check_grammar(WORDS)
    params = SamplingParams(grammar=WORDS, temperature=0.0, max_tokens=20)
    core.add([EngineRequest(request_id="r", prompt_token_ids=[4], params=params, seed=0, eos_token_ids=[EOS])])
    proposed = verified = 0
    while core.has_work:
        output = core.step()
        proposed += sum(stats.num_proposed_tokens for stats in output.stats.drafters.values())
        verified += sum(stats.num_draft_tokens for stats in output.stats.drafters.values())
    assert (proposed, verified) == (0, 0)


def test_a_runner_without_a_compiler_says_so(program: Program) -> None:
    core = make_core(waiting_runner(program, CONFIG), CONFIG, 0)
    params = SamplingParams(grammar=WORDS)
    core.add([EngineRequest(request_id="r", prompt_token_ids=[4], params=params, seed=0, eos_token_ids=[EOS])])
    (output,) = core.step().outputs
    assert "without a tokenizer" in (output.error or "")
    with pytest.raises(RequestError, match="without a tokenizer"):
        core.check_grammar(WORDS)
