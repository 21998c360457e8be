"""The parser of answers against a transport that is none: every form of a body, every way to be wrong, and any cut."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from sol.gateway.upstream.connection import MAX_HEAD_BYTES, Connection, Response
from sol.gateway.upstream.errors import LostError, UpstreamHttpError


class Wire(asyncio.Transport):
    """What a connection does with its transport."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = self.paused = False
        self.unsent = 0

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.written += b"".join(list_of_data)

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_paused(self) -> bool:
        return self.paused

    def get_write_buffer_size(self) -> int:
        return self.unsent


@dataclass
class Kept:
    """A pool that remembers what it was told."""

    idle: list[Connection] = field(default_factory=list)
    left: list[Connection] = field(default_factory=list)

    def made(self, connection: Connection) -> None: ...

    def put(self, connection: Connection) -> None:
        self.idle.append(connection)

    def finishing(self, connection: Connection) -> None:
        self.left.append(connection)

    def lost(self, connection: Connection) -> None: ...


def connected() -> tuple[Kept, Wire, Connection]:
    pool, wire = Kept(), Wire()
    connection = Connection(pool)
    connection.connection_made(wire)
    return pool, wire, connection


async def answer(pieces: Sequence[bytes], *, ends: bool = True) -> tuple[int, bytes, str, bool]:
    """The status, the body, the error's name or nothing, and whether the connection was kept."""
    pool, wire, connection = connected()
    response = connection.send(b"POST / HTTP/1.1\r\n\r\n", b"")
    for piece in pieces:
        if wire.closed:
            break
        connection.data_received(piece)
    if ends:
        connection.connection_lost(None)
    body = b""
    try:
        await response.head()
        while data := await response.read():
            body += data
    except UpstreamHttpError as error:
        return response.status, body, type(error).__name__, bool(pool.idle)
    return response.status, body, "", bool(pool.idle)


LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nX-Sum: 1\r\n\r\n"
WHOLE: list[tuple[bytes, tuple[int, bytes, str, bool]]] = [
    (LENGTH, (200, b"hello", "", True)),
    (CHUNKED, (200, b"hello", "", True)),
    (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + LENGTH, (200, b"hello", "", True)),
    (b"HTTP/1.1 204 No Content\r\n\r\n", (204, b"", "", True)),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", (200, b"", "", True)),
    (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", (200, b"until the end", "", False)),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", (200, b"hello", "", False)),
    (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello", (200, b"hello", "", False)),
]
WRONG: list[tuple[bytes, tuple[int, bytes, str, bool]]] = [
    (b"", (0, b"", "LostError", False)),
    (b"HTTP/1.1 200 OK\r\nContent-Le", (0, b"", "LostError", False)),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", (200, b"hello", "LostError", False)),
    (CHUNKED[:-10], (200, b"hello", "LostError", False)),
    (b"220 a mail server\r\n\r\n", (0, b"", "MalformedError", False)),
    (
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nabc",
        (0, b"", "MalformedError", False),
    ),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nabc", (0, b"", "MalformedError", False)),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\na", (0, b"", "MalformedError", False)),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", (200, b"", "MalformedError", False)),
]


def cut(data: bytes, draw: random.Random) -> list[bytes]:
    places = sorted({0, len(data), *(draw.randrange(len(data) + 1) for _ in range(draw.randrange(8)))})
    return [data[start:end] for start, end in itertools.pairwise(places) if start < end]


@pytest.mark.parametrize(("data", "expected"), [*WHOLE, *WRONG])
async def test_an_answer_is_the_same_wherever_it_is_cut(data: bytes, expected: tuple[int, bytes, str, bool]) -> None:
    assert await answer([data]) == expected
    assert await answer([data[place : place + 1] for place in range(len(data))]) == expected
    draw = random.Random(0)
    for _ in range(30):
        assert await answer(cut(data, draw)) == expected


async def test_any_bytes_come_to_an_end_and_never_to_a_kept_connection_that_is_out_of_step() -> None:
    """Mutations of answers, cut anywhere: nothing but the client's own errors, and the same body whatever the cuts."""
    seeds = [data for data, _ in (*WHOLE, *WRONG) if data]
    draw = random.Random(7)
    outcomes: set[str] = set()
    for _ in range(3000):
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.randrange(1, 5)):
            place = draw.randrange(len(data))
            kind = draw.randrange(4)
            if kind == 0:
                data[place] = draw.randrange(256)
            elif kind == 1:
                del data[place : place + draw.randrange(1, 6)]
            elif kind == 2:
                data[place:place] = data[place : place + draw.randrange(1, 40)]
            else:
                data[place:place] = draw.choice(
                    (b"\r\n", b"\0", b": ", b"0\r\n\r\n", b"Content-Length: 3\r\n", seeds[0])
                )
            data = data or bytearray(b"H")
        whole = await answer([bytes(data)])
        outcomes.add(whole[2])
        status, body, error, _ = await answer(cut(bytes(data), draw))
        assert (status, body, error) == whole[:3], bytes(data)
    assert outcomes == {"", "LostError", "MalformedError"}


async def test_what_comes_after_an_answer_is_nobodys_answer() -> None:
    pool, wire, connection = connected()
    response = connection.send(b"", b"")
    connection.data_received(LENGTH + LENGTH)  # the second was never asked for
    assert await response.read() == b"hello"
    assert wire.is_closing()
    assert not pool.idle
    pool, wire, connection = connected()
    connection.send(b"", b"")
    connection.data_received(LENGTH)
    assert pool.idle == [connection]
    connection.data_received(LENGTH)  # while nothing is asked
    assert wire.is_closing()


async def test_a_request_that_is_not_sent_yet_keeps_its_connection_from_the_next() -> None:
    pool, wire, connection = connected()
    response = connection.send(b"head ", b"b" * 100_000)
    assert wire.written == b"head " + b"b" * 100_000
    wire.unsent = 50_000
    connection.data_received(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
    await response.head()
    assert (response.status, await response.read()) == (413, b"no")
    assert wire.is_closing()
    assert not pool.idle


@pytest.mark.parametrize(
    "endless",
    [
        [b"HTTP/1.1 200 OK\r\n"] + [b"X-%d: y\r\n" % number for number in range(20_000)],
        [b"HTTP/1.1 200 OK\r\nX: "] + [b"y" * 1000] * 200,
        [b"HTTP/1.1 100 Continue\r\n\r\n"] * 5000,
        [CHUNKED[: CHUNKED.index(b"X-Sum")]] + [b"X: y\r\n"] * 20_000,
        [CHUNKED[: CHUNKED.index(b"2;x")] + b"2;x="] + [b"y" * 1000] * 200,
    ],
)
async def test_what_is_no_body_has_an_end(endless: list[bytes]) -> None:
    assert sum(map(len, endless)) > 1.5 * MAX_HEAD_BYTES
    status, body, error, kept = await answer(endless)
    assert (error, kept) == ("MalformedError", False)
    assert (status, body) in ((0, b""), (200, b"hello"), (200, b"hel"))


async def test_a_body_that_nobody_takes_is_not_read() -> None:
    _, wire, connection = connected()
    response = connection.send(b"", b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    for _ in range(10):
        connection.data_received(b"x" * 30_000)
    assert wire.is_paused()
    assert len(await response.read()) == 300_000
    assert not wire.is_paused()
    taken: list[int] = []

    def take(data: bytes) -> bool:
        taken.append(len(data))
        return True

    passing = asyncio.create_task(response.pass_to(take))
    await asyncio.sleep(0)
    connection.data_received(b"x" * 400_000)  # is taken at once
    connection.data_received(b"x" * 300_000)
    await passing
    assert (sum(taken), wire.is_paused()) == (700_000, False)


async def test_pieces_are_taken_until_one_is_refused_and_errors_come_after_them() -> None:
    _, _, connection = connected()
    response = connection.send(b"", b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\na")
    taken: list[bytes] = []

    def take(data: bytes) -> bool:
        taken.append(data)
        return len(taken) != 2

    passing = asyncio.create_task(response.pass_to(take))
    await asyncio.sleep(0)
    connection.data_received(b"b")
    connection.data_received(b"c")
    await passing
    assert taken == [b"a", b"b"]
    passing = asyncio.create_task(response.pass_to(take))
    await asyncio.sleep(0)
    connection.data_received(b"d")
    connection.connection_lost(None)
    with pytest.raises(LostError):
        await passing
    assert taken == [b"a", b"b", b"c", b"d"]


async def test_what_a_taker_raises_is_raised_where_it_is_waited_for() -> None:
    _, wire, connection = connected()
    response = connection.send(b"", b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n")

    def take(data: bytes) -> bool:
        raise ZeroDivisionError

    passing = asyncio.create_task(response.pass_to(take))
    await asyncio.sleep(0)
    connection.data_received(b"a")
    with pytest.raises(ZeroDivisionError):
        await passing
    response.close()
    assert wire.is_closing()


async def test_nobody_waits_for_the_last_bytes_and_they_are_not_kept() -> None:
    pool, wire, connection = connected()
    response = connection.send(b"", b"")
    connection.data_received(CHUNKED[:-30])
    await response.head()
    response.release()
    assert pool.left == [connection]
    connection.data_received(CHUNKED[-30:])
    assert pool.idle == [connection]
    pool, wire, connection = connected()
    response = connection.send(b"", b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    response.release()
    for _ in range(5):
        connection.data_received(b"x" * 30_000)
    assert wire.is_closing()
    assert not pool.idle


async def test_a_cancelled_wait_closes_nothing_by_itself_and_close_does() -> None:
    _, wire, connection = connected()
    response: Response = connection.send(b"", b"")
    waiting = asyncio.create_task(response.head())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not wire.is_closing()
    response.close()
    assert wire.is_closing()
    with pytest.raises(LostError):
        await response.head()
