"""The checks in their order, and the engines they need: one at a time, each ended before the next is started.

Three engines: one without a prefix cache, whose plain answers all others are compared with, and one with it; both
draft at every step, whatever it costs, because what is not drafted is not verified. The third is as the user
configured it, and is timed. Where tokens differ a fourth, which does not speculate, says by how much.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, Self

from sol.config import EngineConfig
from sol.engine.client import EngineClient
from sol.engine.types import EngineInfo
from sol.errors import ConfigError, ContextLengthError
from sol.sampling_params import SamplingParams
from sol.verification import equality, law, speed
from sol.verification.prompts import Prompt
from sol.verification.report import Report
from sol.verification.session import PLAIN, Ask, Session

TOLERANCES: Final = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""In units of logits: what adding up in another order changes, with room to spare."""

Start = Callable[[EngineConfig], EngineClient]


class Bar(Protocol):
    def advance(self, count: int = 1) -> None: ...


Bars = Callable[[int, str], AbstractContextManager[Bar]]
"""Shows progress: of so many answers, under a heading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What is to be checked, and with what."""

    config: EngineConfig
    prompts: Sequence[Prompt]
    must_fit: bool
    """A prompt that is too long is an error, not cut at its beginning: it is the user's."""
    law_prompt: Sequence[int]
    follow_up: Sequence[int]
    """Begins the second turn"""
    eos_token_ids: Sequence[int]
    quick: bool = False
    tolerance: float | None = None
    """In units of logits; None: by the dtype of what is computed."""

    @property
    def max_tokens(self) -> int:
        return 32 if self.quick else 96

    @property
    def num_samples(self) -> int:
        return 1000 if self.quick else 4000

    @property
    def law_seconds(self) -> float:
        return 10.0 if self.quick else 40.0


class _Silent:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        pass

    def advance(self, count: int = 1) -> None:
        pass


def silent(total: int, heading: str) -> _Silent:
    return _Silent()


def run_checks(checks: Checks, start: Start, bars: Bars = silent) -> Report:
    """Raises `ConfigError` for an engine that does not speculate, and what `start` raises."""
    return _Run(checks, start, bars).run()


class _Run:
    def __init__(self, checks: Checks, start: Start, bars: Bars) -> None:
        self._checks, self._start, self._bars = checks, start, bars
        self._speculative = checks.config.speculative()
        if not self._speculative.drafters:
            raise speculation_is_off()
        self._differences: list[equality.Open] = []
        self._report: Report | None = None

    def run(self) -> Report:
        began = time.perf_counter()
        drafting = _drafting_always(self._checks.config)
        first, second = self._uncached(replace(drafting, enable_prefix_caching=False))
        if drafting.enable_prefix_caching:
            with self._session(drafting) as session:
                report = self._reported(session.info)
                self._compare(session, first, "with the prefix cache", prefix_cache=True)
                self._compare(session, second, "second turns", prefix_cache=True)
                self._check_law(session)
        self._measure([case for case in first if case.sampling == "greedy"])
        if self._differences:
            plain = replace(
                self._checks.config, enable_prefix_caching=False, speculation="off", speculative_model=None,
                speculative_config=None, num_speculative_tokens=None,
            )  # fmt: skip
            with self._session(plain) as session:
                equality.judge(session, self._differences, self._reported(session.info).tolerance)
        report = self._reported(None)
        report.seconds = time.perf_counter() - began
        report.conclude()
        return report

    def _uncached(self, config: EngineConfig) -> tuple[list[equality.Case], list[equality.Case]]:
        """The plain answers of first and second turns, and all first turns against theirs."""
        with self._session(config) as session:
            asks = self._asks(session.info)
            with self._bar(session, len(asks) + len(self._checks.prompts), "plain decoding"):
                first = equality.plain_cases(session, asks)
                turns = self._second_turns(first, session.info)
                second = equality.plain_cases(session, turns)
            self._compare(session, first, "without a prefix cache", prefix_cache=False)
            if not self._checks.config.enable_prefix_caching:
                self._check_law(session)
        return first, second

    def _asks(self, info: EngineInfo) -> list[tuple[str, str, int, Ask]]:
        checks = self._checks
        samplings = {"greedy": 0.0}
        if self._speculative.verify_method == "coupled":
            samplings["seeded"] = 0.7  # by the other methods, sampled text keeps its law, not its tokens
        asks = []
        for number, prompt in enumerate(checks.prompts):
            max_tokens = min(checks.max_tokens, info.max_model_len // 2)
            token_ids = prompt.token_ids
            if len(token_ids) + max_tokens > info.max_model_len:
                if checks.must_fit:
                    raise ContextLengthError(
                        f"{prompt.name} has {len(token_ids)} tokens, and {max_tokens} are to be generated, but "
                        f"max_model_len is {info.max_model_len}: shorten it, or raise max_model_len",
                        param="prompts",
                    )
                token_ids = token_ids[max_tokens - info.max_model_len :]
            for sampling, temperature in samplings.items():
                params = SamplingParams(temperature=temperature, max_tokens=max_tokens, detokenize=False)
                asks.append(
                    (prompt.name, sampling, 1, Ask(token_ids, params, _seed(checks.config.seed + number), PLAIN))
                )
        return asks

    def _second_turns(self, first: Sequence[equality.Case], info: EngineInfo) -> list[tuple[str, str, int, Ask]]:
        turns = []
        for case in first:
            if case.sampling != "greedy":
                continue
            token_ids = [*case.ask.token_ids, *case.expected, *self._checks.follow_up]
            max_tokens = min(self._checks.max_tokens // 2, info.max_model_len - len(token_ids))
            if max_tokens > 0:
                params = replace(case.ask.params, max_tokens=max_tokens)
                turns.append((case.prompt, "greedy", 2, Ask(token_ids, params, case.ask.seed, PLAIN)))
        return turns

    def _compare(self, session: Session, cases: Sequence[equality.Case], heading: str, *, prefix_cache: bool) -> None:
        report = self._reported(session.info)
        with self._bar(session, equality.count_answers(cases, report.drafters), heading):
            cells, differences = equality.compare(session, cases, prefix_cache=prefix_cache)
        report.cells += cells
        self._differences += differences

    def _check_law(self, session: Session) -> None:
        checks, report = self._checks, self._reported(session.info)
        room = session.info.max_model_len - law.NUM_TOKENS
        with self._bar(session, law.NUM_PREFIXES + checks.num_samples, "sampled tokens"):
            report.law = law.check_law(
                session,
                checks.law_prompt[-room:],
                verify_method=report.verify_method,
                num_samples=checks.num_samples,
                seconds=checks.law_seconds,
                seed=_seed(checks.config.seed + 1000),
            )

    def _measure(self, cases: Sequence[equality.Case]) -> None:
        config = self._checks.config
        with self._session(config) as session, self._bar(session, speed.count_answers(cases), "as configured"):
            speeds, cell, differences = speed.measure(session, cases, prefix_cache=config.enable_prefix_caching)
        report = self._reported(None)
        report.speeds = speeds
        report.cells.append(cell)
        self._differences += differences

    @contextmanager
    def _session(self, config: EngineConfig) -> Iterator[Session]:
        client = self._start(config)
        try:
            session = Session(client, self._checks.eos_token_ids)
            yield session
            failures = self._reported(session.info).drafter_failures
            for name, count in session.num_failures.items():
                failures[name] = failures.get(name, 0) + count
        finally:
            client.close()

    @contextmanager
    def _bar(self, session: Session, total: int, heading: str) -> Iterator[None]:
        with self._bars(total, heading) as bar:
            session.advance = bar.advance
            try:
                yield
            finally:
                session.advance = silent(0, "").advance

    def _reported(self, info: EngineInfo | None) -> Report:
        """The report, which begins with what the first engine says of itself."""
        if self._report is None:
            assert info is not None
            tolerance = self._checks.tolerance
            self._report = Report(
                model=info.model,
                device=info.device,
                dtype=info.dtype,
                drafters=info.drafters,
                verify_method=self._speculative.verify_method,
                controller=self._speculative.controller,
                num_speculative_tokens=info.num_speculative_tokens,
                tolerance=TOLERANCES[info.dtype] if tolerance is None else tolerance,
                quick=self._checks.quick,
            )
        return self._report


def speculation_is_off() -> ConfigError:
    return ConfigError(
        "speculation is off: there is nothing to compare with plain decoding; leave out --speculation off",
        param="speculation",
    )


def _drafting_always(config: EngineConfig) -> EngineConfig:
    options: dict[str, Any] = {**(config.speculative_config or {}), "controller": "fixed"}
    return replace(config, speculative_config=options)


def _seed(value: int) -> int:
    """`value` as a 64-bit integer: a base seed may be the largest there is."""
    return (value + 2**63) % 2**64 - 2**63
