"""Tokens with speculation are those without: by every drafter, in every company, whatever is asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from arbitrary_controller import ArbitraryController
from looping_llama import EOS, VOCAB, save_looping_llama

from sol import assemble
from sol.assemble import build_core
from sol.config import EngineConfig
from sol.engine.core import EngineCore
from sol.engine.types import EngineRequest, SpeculationParams, SpeculationUsage, TokenLogprobs
from sol.runner import drafters
from sol.sampling_params import SamplingParams
from sol.speculation.propose import Proposal, ProposalRow

BLOCK: Final = 4
MAX_TOKENS: Final = 32

PROMPTS: Final = [[5, 6, 7, 8] * 5, [9], [(3 * i * i + i) % VOCAB for i in range(37)]]
SAMPLINGS: Final = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, penalties": SamplingParams(temperature=0.0, frequency_penalty=0.4, repetition_penalty=1.2),
    "seeded": SamplingParams(temperature=1.0),
    "seeded, cuts": SamplingParams(temperature=0.9, top_k=8, top_p=0.9, min_p=0.02),
    "seeded, penalties": SamplingParams(
        presence_penalty=0.3, frequency_penalty=0.1, repetition_penalty=1.1, logit_bias={6: 1.5, 8: -50.0}
    ),
    "seeded, ends": SamplingParams(min_tokens=7, stop_token_ids=[11], logit_bias={EOS: 5.0}, ignore_eos=False),
    "seeded, logprobs": SamplingParams(top_k=5, logprobs=3),
}
DRAFTERS: Final[dict[str, dict[str, Any]]] = {
    "ngram": {"prompt_lookup_min": 1},
    "suffix": {},
    "draft_model": {"model": "the target itself"},
    "early_exit": {"num_exit_layers": 1},
    "suffix+draft_model": {"model": "the target itself"},
}
CACHING: Final = pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    usage: SpeculationUsage | None = field(default=None, compare=False)
    num_cached_tokens: int = field(default=0, compare=False)

    @property
    def num_accepted(self) -> int:
        return 0 if self.usage is None else sum(c.num_accepted_tokens for c in self.usage.drafters.values())


@dataclass(frozen=True)
class Asked:
    name: str
    prompt: list[int]
    params: SamplingParams
    seed: int = 7
    choice_index: int = 0
    wish: SpeculationParams | None = None


def every_sampling() -> list[Asked]:
    return [
        Asked(f"{name} {index}", prompt, replace(params, max_tokens=MAX_TOKENS, ignore_eos="ends" not in name), index)
        for name, params in SAMPLINGS.items()
        for index, prompt in enumerate(PROMPTS)
    ]


class Run:
    """All requests at once; the engine's books are checked after each step. `before` is called before each."""

    def __init__(
        self, core: EngineCore, wanted: Sequence[Asked], before: Callable[[int], None] = lambda step: None
    ) -> None:
        self.answers = {one.name: Answer() for one in wanted}
        self.preemptions = self.failures = self.most_tokens = 0
        core.add([_request(one) for one in wanted])
        step = 0
        while core.has_work:
            before(step)
            step += 1
            result = core.step()
            core.check_integrity()
            self.preemptions += result.stats.num_preemptions
            self.failures += sum(stats.num_failures for stats in result.stats.drafters.values())
            self.most_tokens = max(self.most_tokens, result.stats.iteration_tokens)
            for output in result.outputs:
                assert output.error is None, output.error
                answer = self.answers[output.request_id]
                answer.token_ids += output.new_token_ids
                answer.logprobs += output.logprobs or []
                answer.finish_reason = output.finish_reason
                answer.usage = output.speculation or answer.usage
                answer.num_cached_tokens = output.num_cached_tokens
        assert result.stats.kv_cache_usage == 0.0

    @property
    def num_accepted(self) -> int:
        return sum(answer.num_accepted for answer in self.answers.values())


def _request(one: Asked) -> EngineRequest:
    return EngineRequest(
        request_id=one.name, prompt_token_ids=one.prompt, params=one.params, seed=one.seed,
        choice_index=one.choice_index, eos_token_ids=[EOS], speculation=one.wish,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_looping_llama(tmp_path_factory.mktemp("looping_llama"))


Engines = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engines]:
    """Engines by their options, each made once unless it is to be fresh. `drafter` is a key of DRAFTERS, which drafts
    at every step unless told otherwise."""
    made: dict[str, EngineCore] = {}

    def make(
        *, drafter: str | None = None, controller: str = "fixed", fresh: bool = False, **options: Any
    ) -> EngineCore:
        values: dict[str, Any] = {
            "model": str(model), "max_model_len": 128, "block_size": BLOCK, "max_num_seqs": 48,
            "max_num_batched_tokens": 96, "kv_cache_memory_bytes": 4 << 20, "speculation": "off",
        }  # fmt: skip
        if drafter is not None:
            wanted = {"method": drafter, "controller": controller, "num_speculative_tokens": 5}
            wanted |= DRAFTERS[drafter] | ({"model": str(model)} if "model" in DRAFTERS[drafter] else {})
            values |= {"speculation": "auto", "speculative_config": wanted}
        values |= options
        if fresh:
            return build_core(EngineConfig(**values), progress=False)
        key = repr(sorted(values.items()))
        if key not in made:
            made[key] = build_core(EngineConfig(**values), progress=False)
        return made[key]

    # What steps take has no part in which tokens they give: as little as can be is measured.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "_MEASURING_SECONDS", 0.0)
        yield make


@pytest.fixture(scope="module")
def plain(engine: Engines) -> dict[str, Answer]:
    """Plain decoding, each request alone, without a prefix cache."""
    core = engine(enable_prefix_caching=False)
    found: dict[str, Answer] = {}
    for one in every_sampling():
        found |= Run(core, [one]).answers
    assert found["greedy 0"].token_ids != found["greedy, penalties 0"].token_ids
    assert found["seeded 0"].token_ids != found["seeded, cuts 0"].token_ids != found["seeded, penalties 0"].token_ids
    assert {found[f"seeded, ends {i}"].finish_reason for i in range(3)} == {"stop"}
    return found


@CACHING
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_alone_and_among_neighbours(engine: Engines, plain: dict[str, Answer], drafter: str, caching: bool) -> None:
    core = engine(drafter=drafter, enable_prefix_caching=caching)
    assert core.info.drafters == drafter.split("+")
    wanted = every_sampling()
    for one in wanted:
        alone = Run(core, [one])
        assert alone.answers == {one.name: plain[one.name]}
        assert alone.num_accepted > 0 or not one.name.startswith("greedy ")
    # Neighbours that decode plainly, or want one drafter only, and come and go at other steps.
    others = [
        Asked(f"other {i}", [(i * 5 + j) % VOCAB for j in range(1 + 7 * i)],
              SamplingParams(max_tokens=3 + 5 * i, ignore_eos=True), wish=SpeculationParams(enabled=i % 2 == 0))
        for i in range(6)
    ]  # fmt: skip
    together = Run(core, [*others[:3], *wanted, *others[3:]])
    assert {one.name: together.answers[one.name] for one in wanted} == plain
    assert together.num_accepted > 0
    assert together.failures == 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_controller_that_weighs_costs(engine: Engines, plain: dict[str, Answer], drafter: str) -> None:
    core = engine(drafter=drafter, controller="goodput")
    assert Run(core, every_sampling()).answers == plain


@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "early_exit"])
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_is_decided_about_drafts(
    engine: Engines, plain: dict[str, Answer], drafter: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arbitrary(drafters: Sequence[str], *_: object, **__: object) -> ArbitraryController:
        return ArbitraryController(seed, drafters)

    monkeypatch.setattr(assemble, "GoodputController", arbitrary)
    core = engine(drafter=drafter, controller="goodput", fresh=True)
    assert Run(core, every_sampling()).answers == plain


@CACHING
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_under_preemption(engine: Engines, plain: dict[str, Answer], drafter: str, caching: bool) -> None:
    info = engine(drafter=drafter).info
    block_bytes = info.kv_cache_bytes // info.num_blocks
    core = engine(
        drafter=drafter, enable_prefix_caching=caching, max_model_len=88, kv_cache_memory_bytes=46 * block_bytes
    )
    run = Run(core, every_sampling())
    assert run.preemptions > 0
    assert run.answers == plain
    assert run.num_accepted > 0
    assert run.failures == 0


@pytest.mark.parametrize("room", [48, 52])
@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_with_little_or_no_room_for_drafts_in_a_step(
    engine: Engines, plain: dict[str, Answer], drafter: str, room: int
) -> None:
    core = engine(drafter=drafter, max_num_batched_tokens=room)
    wanted = every_sampling()
    # The crowd takes the step's tokens; drafts get what it leaves.
    crowd = [
        Asked(f"crowd {i}", [i % VOCAB], replace(wanted[0].params, max_tokens=50)) for i in range(48 - len(wanted))
    ]
    run = Run(core, [*crowd, *wanted])
    assert run.most_tokens <= room
    assert {one.name: run.answers[one.name] for one in wanted} == plain


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_nothing_comes_after_an_end(engine: Engines, plain: dict[str, Answer], drafter: str) -> None:
    """Wherever a request ends, by a token or by its length: most of these places lie among accepted drafts."""
    core = engine(drafter=drafter)
    wanted: list[Asked] = []
    expected: dict[str, tuple[list[int], str]] = {}

    def ask(one: Asked, name: str, token_ids: list[int], reason: str, **changes: Any) -> None:
        wanted.append(replace(one, name=f"{one.name}, {name}", params=replace(one.params, **changes)))
        expected[wanted[-1].name] = token_ids, reason

    for one in every_sampling():
        if one.name not in ("greedy 0", "greedy 2", "seeded 0", "seeded, cuts 2"):
            continue
        full = plain[one.name].token_ids
        for place in range(20):
            ask(one, f"length {place}", full[: place + 1], "length", max_tokens=place + 1)
            if full[place] not in full[:place]:
                ask(one, f"stop {place}", full[: place + 1], "stop", stop_token_ids=[full[place]])
    run = Run(core, wanted)
    assert {name: (answer.token_ids, answer.finish_reason) for name, answer in run.answers.items()} == expected
    assert run.num_accepted > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_up_to_the_model_s_length(engine: Engines, drafter: str) -> None:
    wanted = [
        Asked(f"{temperature} {len(prompt)}", prompt,
              SamplingParams(temperature=temperature, max_tokens=None, ignore_eos=True))
        for temperature in (0.0, 1.0)
        for prompt in (PROMPTS[2], PROMPTS[0] * 6, [3] * 126)
    ]  # fmt: skip
    expected = Run(engine(enable_prefix_caching=False), wanted).answers
    assert all(len(one.prompt) + len(expected[one.name].token_ids) == 128 for one in wanted)
    run = Run(engine(drafter=drafter), wanted)
    assert run.answers == expected
    assert run.failures == 0


def test_past_the_length_of_the_draft_model(engine: Engines, tmp_path: Path) -> None:
    short = save_looping_llama(tmp_path / "short", max_position_embeddings=48)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    wanted = [Asked(f"prompt of {len(prompt)}", prompt, params) for prompt in (PROMPTS[0], PROMPTS[2], PROMPTS[0] * 3)]
    options = {"method": "draft_model", "model": str(short), "controller": "fixed", "num_speculative_tokens": 5}
    run = Run(engine(fresh=True, speculation="auto", speculative_config=options), wanted)
    assert run.answers == Run(engine(), wanted).answers
    assert run.failures == 0
    accepted = [run.answers[one.name].num_accepted for one in wanted]
    assert accepted[0] > accepted[1] > accepted[2] == 0, "as far as the draft model reaches"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_choices_of_one_request(engine: Engines, drafter: str) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    wanted = [Asked(f"choice {i}", PROMPTS[0], params, seed=3, choice_index=i) for i in range(6)]
    run = Run(engine(drafter=drafter), wanted)
    assert run.answers == Run(engine(), wanted).answers
    assert len({tuple(answer.token_ids) for answer in run.answers.values()}) == 6, "each has noise of its own"
    assert run.num_accepted > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_clients_that_leave(engine: Engines, plain: dict[str, Answer], drafter: str) -> None:
    core = engine(drafter=drafter)
    wanted = every_sampling()
    chance = random.Random(5)
    leaving = chance.sample([one.name for one in wanted], 6)

    def before(step: int) -> None:
        if step and leaving:
            core.abort([leaving.pop()])

    left = set(leaving)
    run = Run(core, wanted, before)
    assert not leaving
    for name, answer in run.answers.items():
        if name in left and answer.finish_reason == "abort":
            assert answer.token_ids == plain[name].token_ids[: len(answer.token_ids)]
        else:
            assert answer == plain[name]
    assert Run(core, wanted).answers == plain, "nothing of those who left is in anybody's way"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rejected_drafts_leave_no_trace_in_the_prefix_cache(engine: Engines, drafter: str) -> None:
    """A second turn finds as much of the first one as it does after plain decoding, and reads the same there."""
    params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    first = [Asked(f"first {i}", [*prompt, 1], params, seed=20 + i) for i, prompt in enumerate(PROMPTS)]
    turns: dict[str | None, list[Answer]] = {}
    for name in (None, drafter):
        core = engine(drafter=name, fresh=True)
        answers = Run(core, first).answers
        second = [
            Asked(f"second {i}", [*one.prompt, *answers[one.name].token_ids, 4, 5], replace(params, temperature=0.0))
            for i, one in enumerate(first)
        ]
        turns[name] = [*answers.values(), *Run(core, second).answers.values()]
    assert turns[drafter] == turns[None]
    cached = [[answer.num_cached_tokens for answer in answers] for answers in turns.values()]
    assert cached[0] == cached[1]
    assert all(cached[0][len(PROMPTS) :])


class Failing:
    """Drafts what the target would never say, until it is time to fail."""

    name = "ngram"

    def __init__(self, fail: Callable[[Sequence[ProposalRow]], list[Proposal]]) -> None:
        self._fail = fail
        self.calls = 0

    def propose(self, rows: Sequence[ProposalRow]) -> list[Proposal]:
        self.calls += 1
        return self._fail(rows) if self.calls % 3 == 0 else [Proposal(token_ids=[0] * row.max_tokens) for row in rows]

    def forget(self, request_ids: Sequence[str], *, finished: bool) -> None:
        if self.calls > 3:
            raise RuntimeError("it cannot even forget")


def _raises(error: Exception) -> Callable[[Sequence[ProposalRow]], list[Proposal]]:
    def fail(rows: Sequence[ProposalRow]) -> list[Proposal]:
        raise error

    return fail


@pytest.mark.parametrize(
    "fail",
    [
        _raises(ValueError("a bug")),
        _raises(MemoryError()),
        _raises(torch.OutOfMemoryError("no memory")),
        lambda rows: [],
        lambda rows: [Proposal(token_ids=[VOCAB]) for _ in rows],
        lambda rows: [Proposal(token_ids=[0] * (row.max_tokens + 1)) for row in rows],
        lambda rows: [Proposal(token_ids=[0], scores=[float("nan")]) for _ in rows],
    ],
    ids=["raises", "memory", "device memory", "too few", "no token", "too long", "no score"],
)
def test_a_drafter_that_fails_costs_its_drafts_only(
    engine: Engines, plain: dict[str, Answer], fail: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = Failing(fail)
    monkeypatch.setattr(assemble, "lookup_proposers", lambda config: [proposer])
    monkeypatch.setattr(drafters, "FIRST_REST", 1e-4)
    core = engine(drafter="ngram", fresh=True)
    run = Run(core, every_sampling())
    assert run.answers == plain
    assert run.failures > 1, "it is tried again"
    assert proposer.calls > 6
