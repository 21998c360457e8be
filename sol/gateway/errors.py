"""What the gateway refuses or fails with, and the bytes of an error as OpenAI's clients read them.

    SolError
    └── GatewayError
        ├── AccessDeniedError        403: the key is known and may not do this
        ├── UnknownPathError         404
        ├── MethodNotAllowedError    405
        ├── DuplicateRequestError    409: the same request is still being answered
        ├── RequestTooLargeError     413
        ├── RateLimitError           429: there is capacity, but this client is over its share
        ├── UpstreamError            502: an engine failed, or answered what is no answer
        ├── NoCapacityError          503: nobody can be served now
        │   └── DrainingError        503: the gateway is about to stop
        └── UpstreamTimeoutError     504: an engine kept silent for too long
            └── DeadlineError        504: the client's own deadline has passed, or cannot be met

429 and 503 differ in whose fault it is: a client that gets 429 must slow down, one that gets 503 may go elsewhere.
"""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

from sol.errors import SolError

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; nobody reads it."""


class GatewayError(SolError):
    """`wait`: seconds after which it makes sense to try again; None: what the class says, or nothing."""

    should_retry: ClassVar[bool | None] = None
    """What `x-should-retry` tells OpenAI's clients, which else retry 408, 409, 429 and all of 500 and above."""

    def __init__(self, message: str, *, param: str | None = None, wait: float | None = None) -> None:
        super().__init__(message, param=param)
        self.wait = wait


class AccessDeniedError(GatewayError):
    status = 403
    type = "permission_error"
    code = "access_denied"


class UnknownPathError(GatewayError):
    status = 404
    type = "not_found_error"
    code = "unknown_url"


class MethodNotAllowedError(GatewayError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class DuplicateRequestError(GatewayError):
    status = 409
    type = "conflict_error"
    code = "request_in_progress"


class RequestTooLargeError(GatewayError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class RateLimitError(GatewayError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class UpstreamError(GatewayError):
    status = 502
    type = "upstream_error"
    code = "upstream_failed"


class NoCapacityError(GatewayError):
    status = 503
    type = "service_unavailable_error"
    code = "no_capacity"
    retry_after = 1


class DrainingError(NoCapacityError):
    code = "draining"
    retry_after = 5


class UpstreamTimeoutError(GatewayError):
    status = 504
    type = "timeout_error"
    code = "upstream_timeout"
    should_retry: ClassVar[bool | None] = False
    """The engine may have done the work: a client that asks again has it done twice."""


class DeadlineError(UpstreamTimeoutError):
    code = "deadline_exceeded"


def error_status(error: BaseException) -> int:
    return error.status if isinstance(error, SolError) else 500


def error_code(error: BaseException) -> str:
    """A label for metrics and logs: never a client's own words."""
    return (error.code or error.type) if isinstance(error, SolError) else SolError.type


def error_body(error: BaseException) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`; of what nobody meant to raise, clients learn nothing."""
    if isinstance(error, SolError):
        fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    else:
        message = "the gateway failed to handle this request; its log says why"
        fields = {"message": message, "type": SolError.type, "param": None, "code": None}
    return msgspec.json.encode({"error": fields})


def error_event(error: BaseException) -> bytes:
    """A whole server-sent event that says why a stream ends early. No `[DONE]` may follow it."""
    return b"data: %b\n\n" % error_body(error)


def error_headers(error: BaseException) -> list[tuple[bytes, bytes]]:
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, GatewayError):
        if error.wait is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.wait))))
            headers.append((b"retry-after-ms", b"%d" % max(1, math.ceil(error.wait * 1000))))
        if error.should_retry is not None:
            headers.append((b"x-should-retry", b"true" if error.should_retry else b"false"))
    if not headers and isinstance(error, SolError) and error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after))
    return headers
