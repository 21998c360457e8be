"""What can go wrong between the gateway and an engine. None of these is told to a client: the relay says what it means.

UpstreamHttpError
├── UnreachableError            no connection: refused, no such name, no TLS
│   └── ConnectTimeoutError     nobody took the connection in time
├── LostError                   the connection ended before the answer did
└── MalformedError              what came is no HTTP, or too much of it
"""

from __future__ import annotations


class UpstreamHttpError(Exception):
    """`str()` says what happened, in words that hold nothing of a request or an answer."""


class UnreachableError(UpstreamHttpError):
    pass


class ConnectTimeoutError(UnreachableError):
    pass


class LostError(UpstreamHttpError):
    pass


class MalformedError(UpstreamHttpError):
    pass
