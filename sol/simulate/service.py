"""What the simulated server does with requests: the OpenAI surface over the engine's model, on the real clock.

The engine's clock is `time.monotonic()`. A timer wakes this up when the engine's next step ends; everything that the
step gave is written then, one write a connection. If the process comes late, the steps do not: it catches up, and how
late it was is in the metrics (`sol:simulate_lag_seconds`).
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from prometheus_client import Histogram

from sol.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineNotReadyError,
    RequestError,
    SolError,
    UnknownModelError,
)
from sol.sampling_params import SamplingParams
from sol.seeds import SeedSource
from sol.server.errors import error_code
from sol.server.metrics import Metrics
from sol.server.params import chat_params, completion_params
from sol.server.parsing import parse
from sol.server.protocol import ChatBody, CompletionBody
from sol.server.speculation import speculation_params, wants_segments
from sol.server.stream_usage import StreamUsage
from sol.server.usages import USAGE_KEY_HEADER, Usages
from sol.simulate import vocabulary
from sol.simulate.blocks import block_hashes
from sol.simulate.config import SimulateConfig
from sol.simulate.engine import SimulatedEngine, SimulatedRequest, Step
from sol.simulate.faults import GENERATING, Fault, Faults
from sol.simulate.generation import Generation, respond_error, respond_fault
from sol.simulate.http import Exchange
from sol.simulate.language import answer, check_params, hash_tokens
from sol.simulate.noise import mix
from sol.simulate.responses import DRAFTER, Choice, Schema
from sol.simulate.stats import StatsReader, engine_info
from sol.simulate.timer import Timer
from sol.text.messages import flatten_messages

MAX_RECORDS: Final = 10_000
MAX_CHOICES: Final = 1024
MAX_OUTPUT_TOKENS: Final = 2**17
"""Of one request, all its choices together."""
_LAG_BUCKETS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


class Service:
    """Lives in the event loop's thread. To be closed."""

    def __init__(self, config: SimulateConfig) -> None:
        self.config = config
        self.faults = Faults(config.laws.seed)
        self.engine = SimulatedEngine(config.laws, timing=self.faults.end_of_step)
        self.created = int(time.time())
        self.ready_at = 0.0
        """Before that the process is there and not ready."""
        self.stopping = False
        self.on_drained: Callable[[], None] | None = None
        """Called when no response is open any more."""
        self.records: deque[dict[str, Any]] = deque(maxlen=MAX_RECORDS)
        self.usages = Usages()
        self.num_received = 0
        """Requests to routes that generate; never back to 0."""
        self._open: dict[SimulatedRequest, tuple[Generation, Choice]] = {}
        self._generations: set[Generation] = set()
        self._ordinals = itertools.count()
        self._probes = itertools.count()
        """Ordinals of requests that do not generate: how often somebody looks is not to shift the others' luck."""
        self._stale: bytes | None = None
        self._seeds = SeedSource(config.laws.seed)
        self._timer = Timer(self._wake)
        self._start_metrics()

    @property
    def num_open(self) -> int:
        """Responses that the engine works on."""
        return len(self._generations)

    def close(self) -> None:
        self._timer.close()

    def why_not_ready(self) -> SolError | None:
        if self.stopping:
            return EngineNotReadyError("the server is shutting down")
        now = time.monotonic()
        if now < self.ready_at or self.faults.state("not_ready", now) is not None:
            return EngineNotReadyError("the simulated model is still loading; try again in a few seconds")
        return None

    def why_unhealthy(self) -> SolError | None:
        """What probes are told, which may differ from how work is treated."""
        reason = self.why_not_ready()
        if reason is None and self.faults.state("unhealthy", time.monotonic()) is not None:
            reason = EngineDeadError("simulated: unhealthy")
        return reason

    def faults_changed(self) -> None:
        """Steps in flight may end at another time now."""
        self.engine.retime(time.monotonic())
        self._wake()

    def crash(self) -> None:
        """The process dies: responses are cut, the cache and the counters are gone."""
        generations, self._generations = self._generations, set()
        self._open.clear()
        self.usages = Usages()
        for generation in generations:
            self._record(generation, "crash")
            generation.reset()
        self.engine.reset()
        self._start_metrics()
        self._timer.set(None)

    def fail_all(self, error: SolError) -> None:
        """Every open response ends with this."""
        for generation in list(self._generations):
            generation.fail(error)

    def render_metrics(self) -> bytes:
        stale = self.faults.state("stale_metrics", time.monotonic()) is not None
        if stale and self._stale is not None:
            return self._stale
        self.metrics.set_alive(self.why_unhealthy() is None)
        self._stats.observe(None)
        text = self.metrics.render()
        self._stale = text if stale else None
        return text

    def generate(self, exchange: Exchange) -> None:
        """`/v1/completions` or `/v1/chat/completions`."""
        # It arrived now: what it costs here to read it and to write its answer ahead is no part of the law.
        now = time.monotonic()
        self.engine.advance(now, self._on_step)
        self.num_received += 1
        ordinal = next(self._ordinals)
        met, stopped = self.meet_faults(exchange, ordinal)
        if stopped:
            return
        try:
            reason = self.why_not_ready()
            if reason is not None:
                raise reason
            generation = self._begin(exchange, ordinal, met)
        except SolError as error:
            self.metrics.count_error(error.status, error_code(error))
            respond_error(exchange, error)
            return
        self._generations.add(generation)
        for choice, timeline in zip(generation.choices, generation.timelines, strict=True):
            self._open[choice.request] = generation, choice
            timeline.arrival = now
            self.engine.submit(choice.request, now)
        self._wake()

    def check_model(self, name: str | None) -> str:
        """The name a response carries. Raises `UnknownModelError`."""
        names = self.config.served_model_names
        if name is not None and name not in names:
            raise UnknownModelError(
                f"the model {name[:200]!r} is not served here; use {' or '.join(map(repr, names))}", param="model"
            )
        return name or names[0]

    def meet_faults(self, exchange: Exchange, ordinal: int | None = None) -> tuple[list[Fault], bool]:
        """The faults of a request, and whether one of them is all the answer that it gets."""
        if ordinal is None:
            ordinal = next(self._probes)
        met = self.faults.meet(time.monotonic(), ordinal, exchange.path, exchange.headers)
        for fault in met:
            if fault.kind == "network":
                exchange.slow_down(fault.seconds or 0.0, fault.bytes_per_second)
        for fault in met:
            if fault.kind == "hang":  # the connection stays open, and that is all
                return met, True
            if fault.kind == "error":
                self.metrics.count_error(fault.status, "simulated")
                respond_fault(exchange, fault)
                return met, True
            if fault.kind == "reset" and exchange.path not in GENERATING:
                exchange.reset()
                return met, True
        return met, False

    def _begin(self, exchange: Exchange, ordinal: int, met: list[Fault]) -> Generation:
        """Everything about a request that can be wrong is found here. Raises `SolError`."""
        body: ChatBody | CompletionBody
        if exchange.path == "/v1/chat/completions":
            body = parse(exchange.body, ChatBody)
            params = chat_params(body)
            if body.chat_template_kwargs:
                raise RequestError("chat_template_kwargs is not simulated; remove it", param="chat_template_kwargs")
            messages = flatten_messages(body.messages)
            prompts = [vocabulary.encode_chat(messages, add_generation_prompt=body.add_generation_prompt is not False)]
            echoed = [""]
        else:
            body = parse(exchange.body, CompletionBody)
            params = completion_params(body)
            if len(body.prompt) * params.n > MAX_CHOICES:
                raise RequestError(
                    f"{len(body.prompt)} prompts with n = {params.n} make more than {MAX_CHOICES} choices; send "
                    "several requests",
                    param="prompt",
                )
            prompts = [vocabulary.encode(item) if isinstance(item, str) else item for item in body.prompt]
            echoed = [
                (item if isinstance(item, str) else vocabulary.decode(item)) if body.echo else ""
                for item in map(self._checked, body.prompt)
            ]
        name = self.check_model(body.model)
        check_params(params)
        params.check_vocabulary(vocabulary.VOCAB_SIZE)
        laws = self.config.laws
        drafters = [DRAFTER] if laws.num_speculative_tokens else []
        speculation = speculation_params(body, drafters)
        choices: list[Choice] = []
        num_tokens = 0
        response_id = uuid.UUID(int=mix(laws.seed, ordinal) << 64 | mix(laws.seed + 1, ordinal)).hex
        for prompt_index, prompt in enumerate(prompts):
            room = self._check_length(len(prompt), params, "messages" if isinstance(body, ChatBody) else "prompt")
            seed = self._seeds.next() if params.seed is None else params.seed
            for choice_index in range(params.n):
                said = answer(
                    self.config.text, prompt, params, seed=seed, choice_index=choice_index, most_tokens=room,
                    run=ordinal,
                )  # fmt: skip
                request = SimulatedRequest(
                    request_id=f"{response_id}-{len(choices)}",
                    prompt_tokens=len(prompt),
                    output_tokens=len(said.token_ids),
                    block_hashes=block_hashes([*prompt, *said.token_ids], laws.block_size),
                    # Clients that send one seed with everything shall not have the same luck with every prompt.
                    seed=mix(mix(seed, choice_index), hash_tokens(prompt)),
                    speculate=speculation is None or speculation.enabled,
                )
                choices.append(Choice(len(choices), prompt_index, said, request))
                num_tokens += len(said.token_ids)
                if num_tokens > MAX_OUTPUT_TOKENS:  # writing them ahead would hold up everybody
                    raise RequestError(
                        f"the choices of this request have more than {MAX_OUTPUT_TOKENS} tokens together; send several "
                        "requests",
                        param="n",
                    )
        usages = StreamUsage(body.stream_options)
        chat = isinstance(body, ChatBody)
        schema = Schema(
            chat=chat, model=name, response_id=("chatcmpl-" if chat else "cmpl-") + response_id,
            echoed=[echoed[choice.prompt_index] for choice in choices], usages=usages,
            with_segments=wants_segments(body),
        )  # fmt: skip
        return Generation(
            exchange, choices, schema, stream=bool(body.stream), include_usage=usages.at_end,
            speculates=bool(drafters), faults=met, on_end=self._ended,
        )  # fmt: skip

    def _checked(self, prompt: str | list[int]) -> str | list[int]:
        if not isinstance(prompt, str) and max(prompt) >= vocabulary.VOCAB_SIZE:
            raise RequestError(
                f"prompt: token id {max(prompt)} is not in the vocabulary of {vocabulary.VOCAB_SIZE} tokens",
                param="prompt",
            )
        return prompt

    def _check_length(self, num_prompt_tokens: int, params: SamplingParams, param: str) -> int:
        """Tokens that the output may have."""
        limit = self.config.laws.max_model_len
        room = limit - num_prompt_tokens
        if num_prompt_tokens == 0:
            raise RequestError(f"{param} has no tokens; send at least one", param=param)
        wanted = max(params.max_tokens or 1, params.min_tokens)
        if wanted > room:
            raise ContextLengthError(
                f"{param} has {num_prompt_tokens} tokens and {wanted} are asked for, together more than the context of "
                f"{limit} tokens; shorten the prompt or ask for less",
                param=param,
            )
        return room

    def _wake(self) -> None:
        self.engine.advance(time.monotonic(), self._on_step)
        self._timer.set(self.engine.next_event())

    def _on_step(self, step: Step) -> None:
        touched: dict[Generation, list[tuple[Choice, int, int]]] = {}
        for request, num_tokens, num_accepted in step.emissions:
            generation, choice = self._open[request]
            touched.setdefault(generation, []).append((choice, num_tokens, num_accepted))
            timeline = generation.timelines[choice.index]
            self.metrics.observe_tokens(timeline, num_tokens, 1, step.end)
            if request.finish_time is not None:
                timeline.scheduled = request.scheduled_time or 0.0
                timeline.first_token = request.first_token_time or 0.0
        for generation, items in touched.items():
            generation.take(items)
        self._stats.observe(step)
        self._lag.observe(time.monotonic() - step.end)

    def _ended(self, generation: Generation, reason: str) -> None:
        now = time.monotonic()
        for choice, timeline in zip(generation.choices, generation.timelines, strict=True):
            finished = choice.request.finish_time is not None
            if not finished:
                self.engine.abort(choice.request, now)
            self.metrics.observe_finished(timeline, choice.answer.finish_reason if finished else
                                          "error" if reason == "error" else "abort")  # fmt: skip
            del self._open[choice.request]
        self._generations.discard(generation)
        key = generation.exchange.headers.get(USAGE_KEY_HEADER)
        if key is not None:
            self.usages.keep(key, generation.usage() or {})
        self._record(generation, reason)
        if not self._generations and self.on_drained is not None:
            self.on_drained()

    def _record(self, generation: Generation, reason: str) -> None:
        for choice in generation.choices:
            request = choice.request
            first, last = request.first_token_time, request.finish_time
            self.records.append(
                {
                    "id": request.request_id,
                    "x_request_id": generation.exchange.request_id,
                    "ended": reason,
                    "finish_reason": choice.answer.finish_reason if reason == "finished" else None,
                    "prompt_tokens": request.prompt_tokens,
                    "cached_tokens": request.cached_tokens,
                    "completion_tokens": request.num_output,
                    "arrival_time": request.arrival_time,
                    "queue_seconds": None if request.scheduled_time is None else request.queue_seconds,
                    "ttft_seconds": None if first is None else request.ttft,
                    "e2e_seconds": None if last is None else request.e2e,
                    "num_steps": request.num_steps,
                    "num_preemptions": request.num_preemptions,
                    "num_draft_tokens": request.num_draft_tokens,
                    "num_accepted_tokens": request.num_accepted_tokens,
                    "faults": [fault.kind for fault in generation.faults],
                }
            )

    def _start_metrics(self) -> None:
        name = self.config.served_model_names[0]
        self.metrics = Metrics(name)
        self.metrics.set_engine(engine_info(self.config.laws, name))
        self._stats = StatsReader(self.engine, self.metrics)
        self._lag = Histogram(
            "sol:simulate_lag_seconds", "How late the simulator wrote what a step had given.", ("model_name",),
            buckets=_LAG_BUCKETS, registry=self.metrics.registry,
        ).labels(name)  # fmt: skip
