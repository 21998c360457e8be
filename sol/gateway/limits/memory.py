"""The ledger of one process: exact, because nothing happens between looking and taking."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import repeat

import msgspec

from sol.gateway.errors import RateLimitError
from sol.gateway.limits.ledger import (
    QUANTUM_SECONDS,
    WINDOW_SECONDS,
    Limit,
    Orphan,
    Reservation,
    Standing,
    beyond,
    over,
)


class _Cell:
    """What was taken in one quantum."""

    __slots__ = ("gone", "quantum", "requests", "tokens")

    def __init__(self, quantum: int) -> None:
        self.quantum = quantum
        self.requests = 0
        self.tokens = 0
        self.gone = False
        """It has left the window: what is given back to it now is not there any more."""


class _Window:
    """Sums over the cells of the last minute, oldest first. Every operation but `wait` is O(1), amortised."""

    __slots__ = ("cells", "requests", "tokens")

    def __init__(self) -> None:
        self.cells: deque[_Cell] = deque()
        self.requests = 0
        self.tokens = 0

    def forget(self, last_gone: int) -> None:
        cells = self.cells
        while cells and cells[0].quantum <= last_gone:
            cell = cells.popleft()
            cell.gone = True
            self.requests -= cell.requests
            self.tokens -= cell.tokens

    def add(self, quantum: int, requests: int, tokens: int) -> _Cell:
        cells = self.cells
        if not cells or cells[-1].quantum < quantum:
            cells.append(_Cell(quantum))
        cell = cells[-1]
        self.change(cell, requests, tokens)
        return cell

    def change(self, cell: _Cell, requests: int, tokens: int) -> None:
        cell.requests += requests
        cell.tokens += tokens
        self.requests += requests
        self.tokens += tokens

    def free_after(self, requests: int, tokens: int) -> int:
        """The quantum with which so many requests and so many tokens have left."""
        for cell in self.cells:
            requests -= cell.requests
            tokens -= cell.tokens
            if requests <= 0 and tokens <= 0:
                return cell.quantum
        return self.cells[-1].quantum


class _Entry(msgspec.Struct, eq=False):
    """A reservation that the ledger knows."""

    reservation: Reservation
    cells: tuple[_Cell, ...]
    charged: int
    """Tokens in each of the cells that are its own."""
    lease_ends: float
    seen: str = ""


class MemoryLedger:
    """`window`: seconds that a limit is for; `lease`: seconds after which an owner that is silent has died;
    `retention`: seconds for which it may still settle what was given up then."""

    def __init__(
        self,
        *,
        window: float = WINDOW_SECONDS,
        lease: float = 60.0,
        retention: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._window = window
        self._lease = lease
        self._retention = retention
        self._clock = clock
        self._quanta = round(window / QUANTUM_SECONDS)
        self._windows: dict[str, _Window] = {}
        self._open: dict[str, _Entry] = {}
        self._orphans: OrderedDict[str, tuple[float, _Entry]] = OrderedDict()

    async def reserve(self, reservation: Reservation) -> None:
        self.take(reservation)

    def take(self, reservation: Reservation) -> None:
        """`reserve`, which waits for nothing here."""
        now, quantum = self._now()
        windows = [self._current(limit.scope, quantum) for limit in reservation.limits]
        error: RateLimitError | None = None
        if reservation.id not in self._open and not reservation.settled:
            error = beyond(reservation.limits, reservation.tokens) or self._refusal(reservation, windows, now)
            if error is None:
                cells = tuple([window.add(quantum, 1, reservation.tokens) for window in windows])
                self._open[reservation.id] = _Entry(reservation, cells, reservation.tokens, now + self._lease)
        reservation.standings = tuple(map(self._standing, reservation.limits, windows, repeat(now)))
        if error is not None:
            raise error

    def _refusal(self, reservation: Reservation, windows: Sequence[_Window], now: float) -> RateLimitError | None:
        """That of the limit which takes longest to have room again; None if all have room."""
        tokens = reservation.tokens
        worst: tuple[float, Standing] | None = None
        for limit, window in zip(reservation.limits, windows, strict=True):
            requests_over = 0 if limit.requests is None else window.requests + 1 - limit.requests
            tokens_over = 0 if limit.tokens is None or not tokens else window.tokens + tokens - limit.tokens
            if requests_over > 0 or tokens_over > 0:
                free = window.free_after(requests_over, tokens_over) + self._quanta + 1
                wait = max(free * QUANTUM_SECONDS - now, QUANTUM_SECONDS)
                if worst is None or wait > worst[0]:
                    worst = wait, self._standing(limit, window, now)
        return None if worst is None else over(worst[1], tokens, worst[0])

    async def settle(self, reservation: Reservation, tokens: int, requests: int = 1) -> bool:
        return self.give_back(reservation, tokens, requests)

    def give_back(self, reservation: Reservation, tokens: int, requests: int = 1) -> bool:
        """`settle`, which waits for nothing here."""
        if reservation.settled:
            return False
        _, quantum = self._now()
        entry = self._open.pop(reservation.id, None)
        if entry is None:
            orphan = self._orphans.pop(reservation.id, None)
            entry = orphan[1] if orphan is not None else None
        for index, limit in enumerate(reservation.limits):
            window = self._current(limit.scope, quantum)
            if entry is None:
                if requests or tokens:
                    window.add(quantum, requests, tokens)
                continue
            cell = entry.cells[index]
            if not cell.gone:
                window.change(cell, requests - 1, min(0, tokens - entry.charged))
            if tokens > entry.charged:
                window.add(quantum, 0, tokens - entry.charged)
        reservation.settled = True
        return True

    def note(self, reservation: Reservation) -> None:
        """Count a request that another ledger has let through."""
        now, quantum = self._now()
        if reservation.id not in self._open and not reservation.settled:
            windows = [self._current(limit.scope, quantum) for limit in reservation.limits]
            cells = tuple(window.add(quantum, 1, reservation.tokens) for window in windows)
            self._open[reservation.id] = _Entry(reservation, cells, reservation.tokens, now + self._lease)

    async def renew(self, seen: Sequence[tuple[str, str]]) -> None:
        ends = self._clock() + self._lease
        for key, text in seen:
            entry = self._open.get(key)
            if entry is not None:
                entry.lease_ends = ends
                entry.seen = text

    async def expire(self) -> list[Orphan]:
        now, quantum = self._now()
        found = []
        for key in [key for key, entry in self._open.items() if entry.lease_ends <= now]:
            entry = self._open.pop(key)
            self._orphans[key] = (now, entry)
            found.append(Orphan(key, entry.reservation.info, entry.seen))
        while self._orphans and next(iter(self._orphans.values()))[0] <= now - self._retention:
            self._orphans.popitem(last=False)
        for scope, window in list(self._windows.items()):
            window.forget(quantum - self._quanta - 1)
            if not window.cells:
                del self._windows[scope]
        return found

    async def tick(self) -> None:
        pass

    async def standing(self, limit: Limit) -> Standing:
        now, quantum = self._now()
        return self._standing(limit, self._current(limit.scope, quantum), now)

    async def check_integrity(self) -> None:
        for scope, window in self._windows.items():
            assert window.requests == sum(cell.requests for cell in window.cells), scope
            assert window.tokens == sum(cell.tokens for cell in window.cells), scope
            assert all(cell.requests >= 0 and cell.tokens >= 0 and not cell.gone for cell in window.cells), scope
            quanta = [cell.quantum for cell in window.cells]
            assert quanta == sorted(set(quanta)), scope
        for key, entry in self._open.items():
            assert not entry.reservation.settled, key
            assert key not in self._orphans, key
            for cell in entry.cells:
                assert cell.gone or cell.tokens >= entry.charged, key
                assert cell.gone or cell.requests >= 1, key

    async def close(self) -> None:
        pass

    def _now(self) -> tuple[float, int]:
        now = self._clock()
        return now, math.floor(now / QUANTUM_SECONDS)

    def _current(self, scope: str, quantum: int) -> _Window:
        """The window of `scope` without what has left it: quanta whose last moment is a whole window ago."""
        window = self._windows.get(scope)
        if window is None:
            window = self._windows[scope] = _Window()
        window.forget(quantum - self._quanta - 1)
        return window

    def _standing(self, limit: Limit, window: _Window, now: float) -> Standing:
        reset = 0.0
        if window.cells:
            reset = max(0.0, (window.cells[-1].quantum + self._quanta + 1) * QUANTUM_SECONDS - now)
        return Standing(limit, window.requests, window.tokens, reset)
