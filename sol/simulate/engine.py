"""A discrete-event model of an engine: continuous batching, chunked prefill, a paged KV cache, speculation.

The model has a clock of its own and no other: it is told when requests arrive (`submit`) and how far to go (`advance`).
On a real clock somebody calls `advance` whenever `next_event` has passed; on a virtual one it runs as fast as it can.
Both get the same steps for the same arrivals.

Steps follow one another without a gap while there is work. A step is planned from what is known when it begins: first
every running request in the order of arrival (one token and its drafts, or the next chunk of its prompt), then waiting
ones while tokens, places and blocks are left. When blocks run out, the latest running request is preempted: it waits at
the head of the queue and computes everything again. Who arrives during a step waits for its end.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sol.errors import RequestError
from sol.simulate.blocks import BlockPool, Held
from sol.simulate.laws import EngineLaws
from sol.simulate.noise import mix, uniform


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One choice of a request: what it asks, then what became of it. All times are the engine's clock, in seconds."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    """It always gets as many, unless it is aborted."""
    block_hashes: Sequence[int] = ()
    """Of its whole blocks, prompt then output, as far as others may find them (`sol.simulate.blocks`)."""
    seed: int = 0
    """Which drafts are accepted depends on it."""
    speculate: bool = True

    arrival_time: float = 0.0
    scheduled_time: float | None = None
    """When its first step began."""
    first_token_time: float | None = None
    finish_time: float | None = None
    """When it got its last token, or was aborted."""
    aborted: bool = False
    cached_tokens: int = 0
    """Prompt tokens that were found in the cache when it was first scheduled."""
    num_output: int = 0
    num_steps: int = 0
    """Steps that gave it tokens."""
    num_preemptions: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    token_times: array[float] = field(default_factory=lambda: array("d"))
    """When a step gave it tokens …"""
    token_counts: array[int] = field(default_factory=lambda: array("H"))
    """… and how many."""
    num_computed: int = 0
    """Tokens whose KV cache it has."""
    held: Held = field(default_factory=Held)

    def events(self) -> list[tuple[float, int]]:
        """(time, number of tokens) of each step that gave it some."""
        return list(zip(self.token_times, self.token_counts, strict=True))

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token, which has to be there."""
        assert self.first_token_time is not None
        return self.first_token_time - self.arrival_time

    @property
    def e2e(self) -> float:
        """Seconds from arrival to the end, which has to be there."""
        assert self.finish_time is not None
        return self.finish_time - self.arrival_time

    @property
    def tpot(self) -> float:
        """Seconds a token without the first; 0 for a single token."""
        return (self.e2e - self.ttft) / (self.num_output - 1) if self.num_output > 1 else 0.0

    @property
    def queue_seconds(self) -> float:
        """From arrival to its first step, which has to have begun."""
        assert self.scheduled_time is not None
        return self.scheduled_time - self.arrival_time


Emission = tuple[SimulatedRequest, int, int]
"""What a step gave a request: its tokens, and how many of them were drafted. A tuple: there are millions."""


@dataclass(slots=True)
class Step:
    """A step that has ended."""

    start: float
    end: float
    num_tokens: int
    """Computed: of prompts, decoded, and drafted."""
    emissions: list[Emission]
    longest_draft: int


@dataclass(slots=True)
class Counters:
    """Since the engine began."""

    num_steps: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Counted when a request gets its first token."""
    num_generated_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)


_Scheduled = tuple[SimulatedRequest, int, int]
"""A request in a step: how many tokens it computes, drafts included, and how many of them are drafts."""


Timing = Callable[[float, float], float]
"""(begin, duration by the laws) → when the step ends."""


class SimulatedEngine:
    """See the module. `timing` bends the laws (stalls, slow-downs); steps take what the laws say without it."""

    def __init__(self, laws: EngineLaws, *, timing: Timing | None = None) -> None:
        self.laws = laws
        self.now = 0.0
        """Up to here everything has happened."""
        self._timing = timing
        self.reset()

    def reset(self) -> None:
        """Forget every request, the cache and the counters, as a process that starts again does. The clock goes on."""
        laws = self.laws
        zeros = [0] * laws.num_speculative_tokens
        self.counters = Counters(drafted_per_position=zeros.copy(), accepted_per_position=zeros.copy())
        self.pool = BlockPool(laws.num_blocks, caching=laws.enable_prefix_caching)
        self._noise = random.Random(laws.seed)  # noqa: S311  (simulated noise, no secret)
        self._arrivals: list[tuple[float, int, SimulatedRequest]] = []
        self._order = itertools.count()
        self._waiting: deque[SimulatedRequest] = deque()
        self._running: list[SimulatedRequest] = []
        self._plan: list[_Scheduled] = []
        self._step_start = self._step_duration = 0.0
        self._step_end: float | None = None
        """Of the step in flight."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        return self._step_end is None and not self._arrivals

    def submit(self, request: SimulatedRequest, at: float) -> None:
        """A request arrives. Raises `RequestError` for one that cannot be, `ValueError` for one in the past."""
        if at < self.now:
            raise ValueError(f"a request cannot arrive at {at}: it is {self.now} already")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise RequestError(
                f"a request needs a prompt token and an output token at least, not {request.prompt_tokens} and "
                f"{request.output_tokens}",
                param="prompt",
            )
        total = request.prompt_tokens + request.output_tokens
        if total > self.laws.max_model_len:
            raise RequestError(
                f"prompt and output are {total} tokens, more than max_model_len ({self.laws.max_model_len})",
                param="prompt",
            )
        request.arrival_time = at
        heapq.heappush(self._arrivals, (at, next(self._order), request))

    def abort(self, request: SimulatedRequest, at: float) -> None:
        """Its client left. A step that computes it goes on to its end, and gives it nothing."""
        if request.finish_time is not None:
            return
        request.aborted = True
        request.finish_time = max(at, self.now)
        # One that has not arrived is left out when it does; one that is planned, when its step ends.
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._running and not any(planned is request for planned, _, _ in self._plan):
            self._leave(request)

    def next_event(self) -> float | None:
        """When something happens next if nobody comes; None: never."""
        if self._step_end is None:
            return self._arrivals[0][0] if self._arrivals else None
        return min(self._step_end, self._arrivals[0][0]) if self._arrivals else self._step_end

    def advance(self, until: float, on_step: Callable[[Step], None] | None = None) -> None:
        """Let everything happen up to `until` inclusive. `on_step` is told of each step that ends, and may submit."""
        while (time := self.next_event()) is not None and time <= until:
            if time == math.inf:  # it hangs
                return
            self.now = time
            # Who arrives at the very end of a step can be in the next one.
            while self._arrivals and self._arrivals[0][0] <= time:
                request = heapq.heappop(self._arrivals)[2]
                if not request.aborted:
                    self._waiting.append(request)
            if self._step_end is not None and self._step_end <= time:
                step = self._end_step(self._step_end)
                if on_step is not None:
                    on_step(step)
                    if self._arrivals and self._arrivals[0][0] <= time:
                        continue  # it submitted, or began anew
            if self._step_end is None and (self._running or self._waiting):
                self._begin_step(time)
        if until != math.inf:
            self.now = max(self.now, until)

    def retime(self, now: float) -> None:
        """`timing` has changed its mind: ask it again about the step in flight, which cannot have ended before now."""
        if self._step_end is not None and self._timing is not None:
            self._step_end = max(now, self._timing(self._step_start, self._step_duration))

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless blocks and requests add up."""
        self.pool.check_integrity([request.held for request in self._running])
        assert all(request.held.count == 0 for request in self._waiting)
        assert len(self._running) <= self.laws.max_num_seqs
        assert len({id(request) for request in (*self._running, *self._waiting)}) == self.num_running + self.num_waiting
        assert sum(num_tokens for _, num_tokens, _ in self._plan) <= self.laws.max_num_batched_tokens

    def _begin_step(self, now: float) -> None:
        self._plan = plan = self._schedule(now)
        num_prefill = num_context = num_drafts = longest = 0
        for request, tokens, drafts in plan:
            if tokens - drafts == 1 and request.num_output:
                num_context += request.prompt_tokens + request.num_output
                if drafts:
                    num_drafts += drafts
                    longest = max(longest, drafts)
            else:
                num_prefill += tokens
        laws = self.laws
        duration = laws.step_duration(len(plan), num_prefill, num_context, num_drafts, longest)
        if laws.noise == "lognormal":
            sigma = laws.noise_sigma
            duration *= self._noise.lognormvariate(-sigma * sigma / 2, sigma)
        self._step_start, self._step_duration = now, duration
        self._step_end = now + duration if self._timing is None else self._timing(now, duration)

    def _schedule(self, now: float) -> list[_Scheduled]:
        laws, pool = self.laws, self.pool
        block_size, most_drafts = laws.block_size, laws.num_speculative_tokens
        budget = laws.max_num_batched_tokens
        plan: list[_Scheduled] = []
        running = self._running
        preempted = False
        index = 0
        while index < len(running) and budget:
            request = running[index]
            missing = request.prompt_tokens + request.num_output - request.num_computed
            drafts = 0
            if missing == 1 and request.num_output and most_drafts and request.speculate:
                drafts = min(most_drafts, request.output_tokens - request.num_output - 1, budget - 1)
            tokens = (missing if missing < budget else budget) + drafts
            new = -(-(request.num_computed + tokens) // block_size) - request.held.count
            while new > 0 and not pool.allocate(request.held, new):
                preempted = True
                self._preempt(running[-1])
                if index == len(running):  # that was the request itself
                    break
            else:
                plan.append((request, tokens, drafts))
                budget -= tokens
                index += 1
        if preempted:  # the blocks that are free now are those that were just taken away
            return plan
        while self._waiting and budget and len(running) < laws.max_num_seqs:
            request = self._waiting[0]
            known = request.prompt_tokens + request.num_output
            found = request.block_hashes[: pool.find(request.block_hashes, (known - 1) // block_size)]
            computed = len(found) * block_size
            tokens = min(known - computed, budget)
            if tokens < known - computed and not laws.enable_chunked_prefill:
                break
            if not pool.admit(request.held, found, -(-(computed + tokens) // block_size) - len(found)):
                break
            self._waiting.popleft()
            running.append(request)
            request.num_computed = computed
            if request.scheduled_time is None:
                request.scheduled_time = now
                request.cached_tokens = computed
                if laws.enable_prefix_caching:
                    self.counters.prefix_cache_queries += request.prompt_tokens
                    self.counters.prefix_cache_hits += computed
            # Found by those behind it in the queue, too: in a step every layer writes all tokens before it reads any.
            pool.publish(request.held, request.block_hashes, (computed + tokens) // block_size)
            plan.append((request, tokens, 0))
            budget -= tokens
        return plan

    def _preempt(self, request: SimulatedRequest) -> None:
        self._leave(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._waiting.appendleft(request)

    def _leave(self, request: SimulatedRequest) -> None:
        self.pool.free(request.held)
        self._running.remove(request)

    def _end_step(self, now: float) -> Step:
        counters, pool, block_size = self.counters, self.pool, self.laws.block_size
        emissions: list[Emission] = []
        num_tokens = longest_draft = 0
        left: list[SimulatedRequest] = []
        for request, tokens, drafts in self._plan:
            num_tokens += tokens
            if drafts > longest_draft:
                longest_draft = drafts
            if request.aborted:
                left.append(request)
                continue
            request.num_computed += tokens - drafts
            if request.num_computed == request.prompt_tokens + request.num_output:
                accepted = self._accept(request, drafts) if drafts else 0
                emitted = accepted + 1
                request.num_computed += accepted
                request.num_output += emitted
                request.num_steps += 1
                request.token_times.append(now)
                request.token_counts.append(emitted)
                if request.first_token_time is None:
                    request.first_token_time = now
                    counters.num_prompt_tokens += request.prompt_tokens
                if request.num_output == request.output_tokens:
                    request.finish_time = now
                    left.append(request)
                emissions.append((request, emitted, accepted))
            if request.held.num_published < len(request.block_hashes):
                pool.publish(request.held, request.block_hashes, request.num_computed // block_size)
        for request in left:
            pool.free(request.held)
        if left:
            self._running = [request for request in self._running if request.finish_time is None]
        step = Step(self._step_start, now, num_tokens, emissions, longest_draft)
        counters.num_steps += 1
        counters.num_generated_tokens += sum(emitted for _, emitted, _ in emissions)
        self._plan = []
        self._step_end = None
        return step

    def _accept(self, request: SimulatedRequest, num_drafts: int) -> int:
        rate, counters = self.laws.acceptance_rate, self.counters
        if rate in (0.0, 1.0):
            accepted = num_drafts if rate else 0
        else:
            # The number of successes before the first failure, by inversion.
            u = uniform(mix(mix(self.laws.seed, request.seed), request.num_steps))
            accepted = min(num_drafts, int(math.log1p(-u) / math.log(rate)))
        request.num_drafts += 1
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += accepted
        counters.num_drafts += 1
        counters.num_draft_tokens += num_drafts
        counters.num_accepted_tokens += accepted
        for position in range(num_drafts):
            counters.drafted_per_position[position] += 1
        for position in range(accepted):
            counters.accepted_per_position[position] += 1
        return accepted
