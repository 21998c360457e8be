"""Every error Sol raises on purpose.

    SolError
    ├── ConfigError                 a start-up option that cannot work
    ├── ModelError                  a model that cannot be loaded
    │   ├── ModelNotFoundError      no such path, hub id or wheel
    │   ├── DownloadError           it exists, but could not be fetched
    │   ├── CheckpointError         damaged, incomplete, or with tensors nobody expects
    │   ├── UnsupportedModelError   an architecture, format or option Sol does not implement
    │   └── TokenizerError          no tokenizer, or one that Sol does not know
    ├── OutOfMemoryError            the memory plan does not fit
    ├── EngineStartError            a server that Sol was to start did not become ready
    ├── EndpointError               an endpoint that a tool measures is not there or does not answer as it must
    ├── RequestError                400: the request itself is wrong
    │   └── ContextLengthError      400: prompt (and output) exceed the model's length
    ├── AuthenticationError         401
    ├── UnknownModelError           404: the server serves another model
    ├── UnknownResponseError        404: a response that is not stored
    ├── EngineNotReadyError         503: still loading, or stopping
    ├── EngineDeadError             503: the engine's process is gone
    ├── QueueFullError              503: as many requests wait as may
    └── DeadlineExceededError       504: it could not be answered by the request's deadline

Each carries a message that names the field, the value and the remedy; `param` is the field, `status` the HTTP
status, `type` and `code` what an OpenAI client finds in the error's body, `retry_after` seconds or None, and
`should_retry` what OpenAI's client is told of it, where its own rules would decide wrongly.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import ClassVar


class SolError(Exception):
    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_server_error"
    code: ClassVar[str | None] = None
    retry_after: ClassVar[int | None] = None
    should_retry: ClassVar[bool | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(SolError):
    pass


class ModelError(SolError):
    pass


class ModelNotFoundError(ModelError):
    pass


class DownloadError(ModelError):
    pass


class CheckpointError(ModelError):
    pass


class UnsupportedModelError(ModelError):
    pass


class TokenizerError(ModelError):
    pass


class OutOfMemoryError(SolError):
    pass


class EngineStartError(SolError):
    """`name` of the server, its `command`, its `returncode` (None if it ran still or never), the last lines of its
    log in `tail`, and in `problem` what went wrong."""

    def __init__(self, name: str, command: Sequence[str], returncode: int | None, tail: str, problem: str) -> None:
        text = f"{name} did not start: {problem}\ncommand: {shlex.join(command)}"
        super().__init__(f"{text}\nits last lines:\n{tail}" if tail else text)
        self.name = name
        self.command = tuple(command)
        self.returncode = returncode
        self.tail = tail
        self.problem = problem


class EndpointError(SolError):
    pass


class RequestError(SolError):
    status = 400
    type = "invalid_request_error"


class ContextLengthError(RequestError):
    code = "context_length_exceeded"


class AuthenticationError(SolError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class UnknownModelError(SolError):
    status = 404
    type = "not_found_error"
    code = "model_not_found"


class UnknownResponseError(SolError):
    status = 404
    type = "not_found_error"
    code = "response_not_found"


class EngineNotReadyError(SolError):
    status = 503
    type = "service_unavailable_error"
    code = "engine_not_ready"
    retry_after = 5


class EngineDeadError(SolError):
    status = 503
    type = "service_unavailable_error"
    code = "engine_dead"


class QueueFullError(SolError):
    status = 503
    type = "service_unavailable_error"
    code = "queue_full"
    retry_after = 2


class DeadlineExceededError(SolError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"
    should_retry = False
