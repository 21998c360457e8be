"""Runs a load against an endpoint: `measure(endpoint, load, data)` → `Stage`.

    endpoint = await prepare(Endpoint(url="http://127.0.0.1:8000"))
    stage = await measure(endpoint, at_rate(5, seconds=60), BuiltIn())

Latency counts from the time at which a request was *due*, so a client that comes late does not make the server look
better; how late it came is written down as well. The schedule is absolute: nothing is ever moved.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from sol.bench.data import Conversation, Data
from sol.bench.endpoint import Endpoint
from sol.bench.http import Connection, Pool
from sol.bench.load import ClosedLoop, Load, OpenLoop
from sol.bench.records import CANCELLED, Heartbeats, RequestRecord, Stage
from sol.bench.stream import ResponseSink

logger = logging.getLogger("sol.bench")

_BEAT_SECONDS: Final = 0.01
_TIMER_SECONDS: Final = 0.0015
"""Event loops count in milliseconds. Where arrivals are seldom enough, the last one or two are spent polling, so that
a request leaves at its time."""
_POLLING_GAP_SECONDS: Final = 0.01
"""Mean time between arrivals from which on that is affordable: a fifth of one core at most."""
_AHEAD: Final = 64
"""Requests that are encoded before they are due, in moments in which nothing else is to be done."""
_AHEAD_BYTES: Final = 256 * 2**20
"""The most that the requests may take which a closed loop has ready for its beginning."""
_PREPARING_SECONDS: Final = 0.002
"""The most that such a moment may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    request_seconds: float = 600.0
    """After which a request counts as an error, from when it was sent."""
    drain_seconds: float = 120.0
    """How long what is in flight at the end may take to finish; after that it is cancelled."""


@dataclass(slots=True)
class Tally:
    """What a progress display shows; counts of the stage so far."""

    num_started: int = 0
    num_finished: int = 0
    num_errors: int = 0
    num_in_flight: int = 0
    num_chunks: int = 0
    num_tokens: int = 0
    longest_lag: float = 0.0


class Stop:
    """Ends a run early. `set` may be called from a signal handler of the event loop."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def set(self) -> None:
        self.event.set()

    @property
    def is_set(self) -> bool:
        return self.event.is_set()


async def measure(
    endpoint: Endpoint,
    load: Load,
    data: Data,
    *,
    limits: Limits | None = None,
    stop: Stop | None = None,
    tally: Tally | None = None,
    keep_text: bool = False,
    first: int = 0,
    companion: Callable[[Pool, float], Any] | None = None,
) -> Stage:
    """Everything that was measured, also after `stop`. `endpoint` comes from `prepare`.

    `first` is the first conversation of the data to use. `companion(pool, origin)` makes a coroutine that runs
    alongside and is cancelled at the end: a scraper, for one. Should it fail, that is logged, and the load goes on.
    """
    run = _Run(endpoint, load, data, limits or Limits(), stop or Stop(), tally or Tally(), keep_text, first)
    with _without_collections():
        return await run.run(companion)


class _Run:
    def __init__(
        self,
        endpoint: Endpoint,
        load: Load,
        data: Data,
        limits: Limits,
        stop: Stop,
        tally: Tally,
        keep_text: bool,
        first: int,
    ) -> None:
        self._endpoint = endpoint
        self._load = load
        self._data = data
        self._limits = limits
        self._stop = stop
        self._tally = tally
        self._keep_text = keep_text
        self._next = first
        self._prepared: deque[tuple[Conversation, bytes]] = deque()
        self._pool = endpoint.pool()
        self._origin = 0.0
        self._in_flight: set[_Exchange] = set()
        self._over = False
        """Nothing may begin any more."""
        assert endpoint.counting is not None
        self._stage = Stage(
            load=load.describe(),
            counting=endpoint.counting,
            started_at=0.0,
            heartbeats=Heartbeats(_BEAT_SECONDS),
            closed_loop=isinstance(load, ClosedLoop),
        )

    def now(self) -> float:
        return self._pool.clock() - self._origin

    async def run(self, companion: Callable[[Pool, float], Any] | None) -> Stage:
        stage = self._stage
        wanted = self._load.concurrency if isinstance(self._load, ClosedLoop) else 1
        size = 0
        while len(self._prepared) < wanted and size < _AHEAD_BYTES:
            self._prepare_next()
            size += len(self._prepared[-1][1])
        stage.started_at = time.time()
        self._origin = self._pool.clock()
        cpu = time.process_time()
        beats = asyncio.ensure_future(self._beat())
        beside = None if companion is None else asyncio.ensure_future(companion(self._pool, self._origin))
        others = [beats] if beside is None else [beats, beside]
        try:
            if isinstance(self._load, ClosedLoop):
                await self._closed(self._load)
            else:
                await self._open(self._load)
        finally:
            stage.seconds = self.now()
            stage.cpu_seconds = time.process_time() - cpu
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            self._pool.close()
            stage.interrupted = self._stop.is_set
            stage.records.sort(key=lambda record: record.index)
        if not beats.cancelled() and (error := beats.exception()) is not None:
            raise error
        if beside is not None and not beside.cancelled() and (error := beside.exception()) is not None:
            # What was measured is worth more than what was to be seen beside it.
            logger.warning("what runs beside the load has failed", exc_info=error)
        return stage

    # Loads

    async def _open(self, load: OpenLoop) -> None:
        span = float(load.arrivals[-1])
        precise = len(load.arrivals) * _POLLING_GAP_SECONDS <= span or len(load.arrivals) == 1
        tasks: set[asyncio.Task[float]] = set()
        for arrival in load.arrivals.tolist():
            if not self._prepared:
                self._prepare_next()
            await self._until(arrival, precise=precise)
            if self._stop.is_set:
                break
            task = asyncio.create_task(self._converse(*self._prepared.popleft(), arrival))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        self._stage.load_seconds = self.now()
        await self._drain(tasks)

    async def _closed(self, load: ClosedLoop) -> None:
        left = load.num_conversations
        ends = self.now() + load.seconds if load.seconds is not None else None

        draining = asyncio.Event()

        def exhausted() -> bool:
            return self._over or self._stop.is_set or left == 0 or (ends is not None and self.now() >= ends)

        async def slot() -> None:
            nonlocal left
            due = 0.0
            try:
                while not exhausted():
                    if left is not None:
                        left -= 1
                    if not self._prepared:
                        self._prepare_next()
                    begin = self.now()
                    due = await self._converse(*self._prepared.popleft(), due)
                    if self.now() - begin < 0.001:  # whatever fails at once must not keep the event loop for itself
                        await asyncio.sleep(0.001)
            except Exception:
                left = 0
                raise
            finally:
                if not draining.is_set():  # the first that has nothing to do ends the load
                    self._stage.load_seconds = self.now()
                    draining.set()

        slots: set[asyncio.Task[None]] = {asyncio.create_task(slot()) for _ in range(load.concurrency)}
        events = [asyncio.ensure_future(draining.wait()), asyncio.ensure_future(self._stop.event.wait())]
        try:
            timeout = None if ends is None else max(0.0, ends - self.now())
            await asyncio.wait(events, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in events:
                event.cancel()
        await self._drain(slots)

    async def _drain(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        """Wait for what is in flight; cancel it when the time is over or the run is stopped."""
        pending = set(tasks)
        deadline = self.now() + self._limits.drain_seconds
        stopped = asyncio.ensure_future(self._stop.event.wait())
        try:
            while pending and not self._stop.is_set and self.now() < deadline:
                done, _ = await asyncio.wait(
                    [*pending, stopped], timeout=deadline - self.now(), return_when=asyncio.FIRST_COMPLETED
                )
                pending -= done
        finally:
            stopped.cancel()
        self._over = True
        for exchange in list(self._in_flight):
            exchange.give_up(CANCELLED, "the run ended before the response did")
        for task in pending:  # that wait between turns, or for a connection
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    # Requests

    def _prepare_ahead(self, until: float) -> None:
        while len(self._prepared) < _AHEAD and self.now() < until:
            self._prepare_next()

    def _prepare_next(self) -> None:
        conversation = self._data.conversation(self._next)
        self._next += 1
        self._prepared.append((conversation, self._encode(conversation, 0, [])))

    def _encode(self, conversation: Conversation, turn: int, history: list[dict[str, Any]]) -> bytes:
        asked = conversation.turns[turn]
        prompt = asked.prompt if isinstance(asked.prompt, str) and not history else history + asked.messages()
        return self._endpoint.post(self._endpoint.completion_body(prompt, asked.max_tokens, asked.body))

    async def _converse(self, conversation: Conversation, request: bytes, due: float) -> float:
        """All turns; returns when the last ended. A turn that fails ends the conversation."""
        history: list[dict[str, Any]] = []
        several = len(conversation.turns) > 1
        for number, turn in enumerate(conversation.turns):
            if number:
                due += turn.delay
                request = self._encode(conversation, number, history)
                await self._until(due, precise=False)
                if self._over or self._stop.is_set:
                    break
            record = RequestRecord(len(self._stage.records), conversation.key, number, due)
            self._stage.records.append(record)
            await _Exchange(self, record, keep_text=self._keep_text or several).run(request)
            due = record.end
            if not record.ok:
                break
            if several:
                history += [*turn.messages(), {"role": "assistant", "content": record.text or ""}]
                if not self._keep_text:
                    record.text = record.token_ids = None
        return due

    async def _until(self, moment: float, *, precise: bool) -> None:
        """Return at `moment`, or at once when the run is stopped."""
        while (left := moment - self.now()) > 0 and not self._stop.is_set:
            if precise and left <= _TIMER_SECONDS + 0.0005:
                await asyncio.sleep(0)
            else:
                try:
                    async with asyncio.timeout(left - _TIMER_SECONDS if precise else left):
                        await self._stop.event.wait()
                except TimeoutError:
                    pass

    # Watching the client

    async def _beat(self) -> None:
        beats, due = self._stage.heartbeats, self.now()
        while True:
            due += beats.interval
            await asyncio.sleep(max(0.0, due - self.now()))
            now = self.now()
            lag = max(0.0, now - due)
            beats.due.append(due)
            beats.lag.append(lag)
            beats.in_flight.append(self._tally.num_in_flight)
            self._tally.longest_lag = max(self._tally.longest_lag, lag)
            if lag < _PREPARING_SECONDS and not self._over:
                self._prepare_ahead(now + _PREPARING_SECONDS)
            if lag > beats.interval:  # one long lag, not one for each beat that was missed
                due = now


class _Exchange:
    """One request under way."""

    def __init__(self, run: _Run, record: RequestRecord, *, keep_text: bool) -> None:
        self._run = run
        self._record = record
        self._connection: Connection | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sink = ResponseSink(record, self._done, run._origin, stream=run._endpoint.stream, keep_text=keep_text)

    async def run(self, request: bytes) -> None:
        run, record = self._run, self._record
        tally = run._tally
        record.started = run.now()
        tally.num_started += 1
        tally.num_in_flight += 1
        run._in_flight.add(self)
        timer = asyncio.get_running_loop().call_later(run._limits.request_seconds, self._time_out)
        try:
            self._connection = run._pool.take()
            if self._connection is None:
                try:
                    self._connection = await run._pool.connect()
                except TimeoutError:
                    self._sink.give_up("connect", "the connection could not be opened in time", run._pool.clock())
                except OSError as error:
                    # No file descriptors or ports left: the client's fault.
                    kind = "client" if error.errno in _CLIENT_ERRORS else "connect"
                    self._sink.give_up(kind, str(error), run._pool.clock())
            record.connected = run.now()
            if self._connection is not None and not self._done.done():
                self._connection.send(request, self._sink)
                record.sent = run.now()
                await self._done
            elif self._connection is not None:  # it was opened too late
                self._connection.abort()
        except asyncio.CancelledError:
            self.give_up(CANCELLED, "the run ended before the request was sent")
        finally:
            timer.cancel()
            run._in_flight.discard(self)
            tally.num_in_flight -= 1
            tally.num_finished += 1
            tally.num_errors += not record.ok and not record.cancelled
            tally.num_chunks += record.num_chunks
            tally.num_tokens += record.completion_tokens or record.num_chunks

    def give_up(self, kind: str, message: str) -> None:
        if not self._done.done():
            if self._connection is not None:
                self._connection.abort()
            self._sink.give_up(kind, message, self._run._pool.clock())

    def _time_out(self) -> None:
        self.give_up("timeout", f"no complete response in {self._run._limits.request_seconds:g} s")


_CLIENT_ERRORS: Final = frozenset({23, 24, 99, 12})
"""ENFILE, EMFILE, EADDRNOTAVAIL, ENOMEM"""


@contextmanager
def _without_collections() -> Iterator[None]:
    """A collection of garbage stops everything for as long as it looks at all records: a stall in all streams that the
    server has no part in. What a run leaves behind holds hardly any cycles, so little piles up meanwhile."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
