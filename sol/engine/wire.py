"""The messages between a `ProcessClient` and the engine's process, as msgpack.

    parent ── StartUp (stdin), Hello ────────────────▶ child
    parent ◀─ Hello, then Ready | Failed ───────────── child
    parent ── AddRequests | AbortRequests | Shutdown ▶ child
    parent ◀─ Output, one a step ───────────────────── child

Requests travel one by one inside `AddRequests`, still encoded, so that one which does not decode fails alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from sol import errors
from sol.config import EngineConfig
from sol.engine.types import EngineInfo, EngineOutput, EngineRequest

_LENGTH_BYTES = 4


class StartUp(msgspec.Struct):
    """Travels over the child's stdin, behind its length; stdin then stays open as long as the parent lives."""

    config: EngineConfig
    directory: str
    """Where the sockets are, until both sides are connected. Whoever is left then removes it."""
    input_address: str
    """The child binds it and receives requests there."""
    output_address: str
    """The parent binds it and receives outputs there."""


class Hello(msgspec.Struct, tag="hello"):
    """The first message of each side: the sockets are connected."""


class EncodedRequest(msgspec.Struct, array_like=True):
    request_id: str
    body: msgspec.Raw


class AddRequests(msgspec.Struct, tag="add"):
    requests: list[EncodedRequest]


class AbortRequests(msgspec.Struct, tag="abort"):
    request_ids: list[str]


class Shutdown(msgspec.Struct, tag="shutdown"):
    pass


class Ready(msgspec.Struct, tag="ready"):
    info: EngineInfo


class Failed(msgspec.Struct, tag="failed"):
    """The engine could not be built."""

    error_class: str
    message: str
    param: str | None

    @classmethod
    def of(cls, error: Exception) -> Failed:
        param = error.param if isinstance(error, errors.SolError) else None
        return cls(error_class=type(error).__name__, message=str(error), param=param)

    def to_error(self) -> errors.SolError:
        """The same error again if it is one of Sol's own, else an `EngineDeadError` that quotes it."""
        error_class = getattr(errors, self.error_class, None)
        if isinstance(error_class, type) and issubclass(error_class, errors.SolError):
            return error_class(self.message, param=self.param)
        return errors.EngineDeadError(f"the engine failed to start: {self.error_class}: {self.message}")


class Output(msgspec.Struct, tag="output"):
    output: EngineOutput


ToEngine: TypeAlias = Hello | AddRequests | AbortRequests | Shutdown
FromEngine: TypeAlias = Hello | Ready | Failed | Output

_encoder = msgspec.msgpack.Encoder()
_start_up_decoder = msgspec.msgpack.Decoder(StartUp)
_request_decoder = msgspec.msgpack.Decoder(EngineRequest)
_to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def encode_requests(requests: Sequence[EngineRequest]) -> bytes:
    """Raises `TypeError` or `OverflowError` for what msgpack cannot carry (a numpy integer, say)."""
    return _encoder.encode(
        AddRequests([EncodedRequest(r.request_id, msgspec.Raw(_encoder.encode(r))) for r in requests])
    )


def decode_request(encoded: EncodedRequest) -> EngineRequest:
    """Raises `msgspec.ValidationError`, or `RequestError` from `SamplingParams`."""
    return _request_decoder.decode(encoded.body)


def decode_to_engine(frame: bytes) -> ToEngine:
    return _to_engine_decoder.decode(frame)


def decode_from_engine(frame: bytes) -> FromEngine:
    return _from_engine_decoder.decode(frame)


def encode_start_up(message: StartUp) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def read_start_up(fd: int) -> StartUp:
    """Raises `EOFError` if the parent is gone before it has written everything."""
    length = int.from_bytes(_read_exactly(fd, _LENGTH_BYTES), "big")
    return _start_up_decoder.decode(_read_exactly(fd, length))


def _read_exactly(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = os.read(fd, count - len(data))
        if not chunk:
            raise EOFError("the start-up message ended early")
        data += chunk
    return data
