"""Whatever arrives, whenever: every request gets the tokens it would get alone, and the books always balance."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from arbitrary_controller import ArbitraryController
from hypothesis import given, note, settings
from hypothesis import strategies as st
from token_runner import EOS, VOCAB_SIZE, TokenRunner, expected_output, make_core, make_request

from sol.config import SchedulerConfig
from sol.engine.speculation import Speculation
from sol.engine.types import TARGET, EngineRequest, RequestOutput, SpeculationParams


@dataclass(frozen=True)
class Arrive:
    """A request of `n` choices; prompts are cut from a few common texts so that they share beginnings."""

    text: int
    length: int
    tail: list[int]
    n: int
    max_tokens: int | None
    min_tokens: int
    eos: bool
    stop_token_ids: list[int]
    logprobs: int | None
    prompt_logprobs: int | None = None
    breaks_after: int | None = None
    """Output tokens behind which its logits are not finite"""
    priority: int = 0
    salt: str | None = None


@dataclass(frozen=True)
class Abort:
    which: int


@dataclass(frozen=True)
class Steps:
    count: int


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    block_size = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(2, 40))
    fewest = -(-max_model_len // block_size)
    return SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 48)),
        max_num_prefill_tokens=draw(st.integers(1, 16)),
        block_size=block_size,
        num_blocks=fewest + draw(st.integers(0, 2 * fewest)),
        enable_prefix_caching=draw(st.booleans()),
        max_num_logits_rows=draw(st.sampled_from([None, None, 6, 9])),
        num_invariant_tokens=draw(st.sampled_from([None, None, 4, 12])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
    )


@st.composite
def arrivals(draw: st.DrawFn) -> Arrive:
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 24)))
    return Arrive(
        text=draw(st.integers(0, 1)),
        length=draw(st.integers(0, 36)),
        tail=draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4)),
        n=draw(st.integers(1, 3)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens or 4)),
        eos=draw(st.booleans()),
        stop_token_ids=draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8)),
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0, 2])),
        breaks_after=draw(st.sampled_from([None, None, None, None, 0, 1, 3, 7])),
        priority=draw(st.sampled_from([0, 0, 1, -1, 5])),
        salt=draw(st.sampled_from([None, None, "a", "b"])),
    )


SCRIPTS = st.lists(
    st.one_of(arrivals(), arrivals(), st.builds(Abort, st.integers(0, 30)), st.builds(Steps, st.integers(1, 8))),
    max_size=24,
)


@dataclass
class Client:
    """Drives a core, and collects what each request gets."""

    config: SchedulerConfig
    num_speculative_tokens: int = 0
    work_ahead: int = 0
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, RequestOutput] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    drafted: dict[str, int] = field(default_factory=dict)
    """Tokens of each request that a drafter made"""
    judged: set[str] = field(default_factory=set)
    """Requests whose prompts' logprobs came"""

    def __post_init__(self) -> None:
        self.runner = TokenRunner(self.config)
        self.controller = ArbitraryController(self.num_speculative_tokens, drafters=["lookup", "caching"])
        self.speculation = speculation = None
        if self.num_speculative_tokens:
            self.speculation = speculation = Speculation(
                self.controller, num_speculative_tokens=self.num_speculative_tokens, caching=["caching"]
            )
        self.core = make_core(self.config, self.runner, self.work_ahead, speculation)

    def arrive(self, arrive: Arrive) -> None:
        prompt = [(arrive.text * 7 + i * i) % VOCAB_SIZE for i in range(arrive.length)] + arrive.tail
        first = len(self.requests)
        for choice in range(arrive.n):
            request = make_request(
                f"{first}.{choice}",
                prompt,
                seed=first,
                choice_index=choice,
                eos=arrive.eos,
                max_tokens=arrive.max_tokens,
                min_tokens=arrive.min_tokens,
                stop_token_ids=arrive.stop_token_ids,
                logprobs=arrive.logprobs,
                prompt_logprobs=arrive.prompt_logprobs,
            )
            request.speculation = SpeculationParams(include_origins=True)
            request.priority, request.cache_salt = arrive.priority, arrive.salt
            self.requests[request.request_id] = request
            self.tokens[request.request_id] = []
            if arrive.breaks_after is not None:
                self.runner.breaks_at[request.request_id] = len(prompt) + arrive.breaks_after
            self.core.add([request])

    def abort(self, which: int) -> None:
        if self.requests:
            self.core.abort([list(self.requests)[which % len(self.requests)], "unknown"])

    def step(self) -> None:
        output = self.core.step()
        assert self.core.dead is None, "the step failed; the log has the runner's assertion"
        self.core.check_integrity()
        assert self.speculation is None or self.speculation.failure is None
        for item in output.outputs:
            assert item.request_id not in self.last, "an output after the last one"
            self.tokens[item.request_id] += item.new_token_ids
            wants_logprobs = self.requests[item.request_id].params.logprobs is not None
            assert (item.logprobs is not None) == wants_logprobs or item.finish_reason == "error"
            if item.logprobs is not None:
                assert [p.top[0][0] for p in item.logprobs if p.top] in ([], item.new_token_ids)
                assert len(item.logprobs) == len(item.new_token_ids)
            if item.prompt_logprobs is not None:
                prompt = self.requests[item.request_id].prompt_token_ids
                assert item.new_token_ids == self.tokens[item.request_id], "not with the first tokens"
                assert [-8 * p.logprob for p in item.prompt_logprobs] == prompt[1:]
                self.judged.add(item.request_id)
            if item.origins is not None:
                assert len(item.origins) == len(item.new_token_ids)
                drafted = sum(origin != TARGET for origin in item.origins)
                self.drafted[item.request_id] = self.drafted.get(item.request_id, 0) + drafted
                assert all(origin == TARGET for origin in item.origins[drafted:]), "a draft after the target's token"
            if item.finish_reason is not None:
                self.last[item.request_id] = item
        for name in ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "num_prompt_tokens",
                     "num_generated_tokens", "iteration_tokens"):  # fmt: skip
            self.counted[name] = self.counted.get(name, 0) + getattr(output.stats, name)

    def finish(self) -> None:
        # One token a step, each request preempted again by every older one: far more steps than it can ever take.
        for _ in range(100 + len(self.requests) ** 2 * self.config.max_model_len**2):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "the engine does not come to an end"
        self.step()

    def check(self) -> None:
        assert self.last.keys() == self.requests.keys()
        for name, request in self.requests.items():
            last, tokens = self.last[name], self.tokens[name]
            assert (name in self.judged) == (request.params.prompt_logprobs is not None and bool(tokens))
            if not 0 < len(request.prompt_token_ids) < self.config.max_model_len:
                assert (last.finish_reason, tokens) == ("abort" if last.error is None else "error", [])
                continue
            wanted, reason = expected_output(request, self.config.max_model_len)
            if last.finish_reason == "abort":
                assert tokens == wanted[: len(tokens)]
                continue
            breaks_at = self.runner.breaks_at.get(name)
            if breaks_at is not None and breaks_at < len(request.prompt_token_ids) + len(wanted):
                assert (tokens, last.finish_reason) == (wanted[: breaks_at - len(request.prompt_token_ids)], "error")
                continue
            assert (tokens, last.finish_reason) == (wanted, reason)
            ended_by_stop_id = reason == "stop" and not (EOS in request.eos_token_ids and tokens[-1] == EOS)
            assert last.stop_token_id == (tokens[-1] if ended_by_stop_id else None)
            assert 0 < last.scheduled_time <= last.first_token_time
            assert last.num_cached_tokens < len(request.prompt_token_ids)
        assert self.core.step().stats.kv_cache_usage == 0.0
        assert self.counted["num_generated_tokens"] == sum(len(t) for t in self.tokens.values())
        assert self.counted["iteration_tokens"] == self.runner.num_computed_tokens
        assert self.counted["prefix_cache_hits"] <= self.counted["prefix_cache_queries"]
        assert not self.controller.open
        accepted = sum(emission.num_accepted_tokens for emission in self.controller.emissions)
        assert accepted <= self.runner.num_accepted_tokens
        for name, last in self.last.items():
            if last.speculation is not None:
                counts = last.speculation.drafters.values()
                assert sum(count.num_accepted_tokens for count in counts) == self.drafted.get(name, 0)


@settings(max_examples=250, deadline=None)
@given(
    config=configs(),
    drafts_and_depth=st.sampled_from([(0, 0), (0, 1), (0, 2), (1, 0), (4, 0), (9, 0), (4, 1), (9, 1), (4, 2)]),
    script=SCRIPTS,
)
def test_every_request_gets_what_it_would_get_alone(
    config: SchedulerConfig, drafts_and_depth: tuple[int, int], script: list[object]
) -> None:
    client = Client(config, *drafts_and_depth)
    for action in script:
        if isinstance(action, Arrive):
            client.arrive(action)
        elif isinstance(action, Abort):
            client.abort(action.which)
        elif isinstance(action, Steps):
            for _ in range(action.count):
                client.step()
    client.finish()
    note(f"counted: {client.counted}")
    client.check()


@pytest.mark.parametrize("work_ahead", [0, 1])
def test_the_property_is_not_vacuous(work_ahead: int) -> None:
    """One script in which prefix hits, sharing within a step, preemption and chunked prefill all do happen."""
    config = SchedulerConfig(
        max_model_len=40,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_num_prefill_tokens=8,
        block_size=4,
        num_blocks=16,
        enable_prefix_caching=True,
    )
    client = Client(config, 4, work_ahead)
    for text in (0, 1, 0):
        client.arrive(
            Arrive(
                text, length=18, tail=[], n=3, max_tokens=20, min_tokens=0, eos=False, stop_token_ids=[], logprobs=None
            )
        )
    client.finish()
    client.check()
    assert client.counted["num_preemptions"] > 0
    assert client.counted["prefix_cache_queries"] == 9 * 18
    assert client.counted["prefix_cache_hits"] > 3 * 16
    shared = [
        p for p in client.runner.plans if any(n.num_computed_tokens for n in p.new_requests) and p.cached_requests
    ]
    assert shared
    assert max(len(p.num_scheduled_tokens) for p in client.runner.plans) > 1
    assert client.runner.num_accepted_tokens > 5
