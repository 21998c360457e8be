"""What a server is started with."""

from __future__ import annotations

from dataclasses import dataclass, field

from sol.config import EngineConfig
from sol.errors import ConfigError
from sol.text.answer_format import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Raises `ConfigError` for values that cannot work."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free port; `ServerReady.url` says which."""
    served_model_names: tuple[str, ...] = ()
    """The names clients may ask for; the first is the one in responses and metrics. Default: the engine's model."""
    api_keys: tuple[str, ...] = ()
    """Any of these opens the API; none: it is open to all who reach the port."""
    max_body_bytes: int = 32 * 2**20
    stall_timeout: float = 120.0
    """Seconds without a word from the engine, while requests are open, after which `/live` says 503."""
    shutdown_timeout: float = 5.0
    """Seconds that open connections get to take their last bytes when the server stops."""
    drain_timeout: float = 25.0
    """Seconds that open requests get to finish after SIGTERM; 0: none."""
    max_queue_len: int = 4096
    """Most requests that wait for a place in the batch; more are turned away."""
    restart_engine: int = 0
    """How often in ten minutes an engine that died or hangs is started again; 0: never."""
    max_stored_responses: int = 1000
    """Of `/v1/responses`, which can be gone on from; 0: none."""
    tool_call_parser: str = AUTO
    """In what form the model calls tools: a name of `TOOL_PARSERS`, "auto" (as its chat template shows) or "none"."""
    enable_auto_tool_choice: bool | None = None
    """Whether the model may choose to call a tool; None: if it is known how it does. True insists on that."""
    reasoning_parser: str = AUTO
    """How the model marks its reasoning: a name of `REASONING_PARSERS`, "auto" (as its chat template shows) or "none":
    it stays in the content."""
    enable_log_requests: bool = False
    """A line of the log for each request that was answered."""
    max_log_len: int = 0
    """Characters of each prompt in that line."""
    otlp_traces_endpoint: str | None = None
    """Where spans go, by OTLP over HTTP."""
    allowed_origins: tuple[str, ...] = ()
    """Of web pages that may call the API from a browser (CORS); "*" allows all, none allows only the server's own."""
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be 0 (any free one) to 65535, not {self.port}", param="port")
        if not self.host:
            raise ConfigError("host must be an address or a name, for instance 127.0.0.1 or 0.0.0.0", param="host")
        if not all(self.served_model_names):
            raise ConfigError("served_model_name must not be empty", param="served_model_name")
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in self.api_keys):
            raise ConfigError(
                "api_key must be printable ASCII without spaces, and not empty: it travels in an HTTP header",
                param="api_key",
            )
        if self.max_body_bytes < 1024:
            raise ConfigError(
                f"max_body_bytes must be at least 1024, not {self.max_body_bytes}", param="max_body_bytes"
            )
        for name in ("stall_timeout", "shutdown_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0 seconds, not {getattr(self, name)}", param=name)
        if not 0 <= self.drain_timeout <= 86400:
            raise ConfigError(
                f"drain_timeout must be 0 (do not wait) to 86400 seconds, not {self.drain_timeout}",
                param="drain_timeout",
            )
        for name, least in (
            ("max_queue_len", 1),
            ("restart_engine", 0),
            ("max_stored_responses", 0),
            ("max_log_len", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}", param=name)
        for name, known in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            allowed = (AUTO, NONE, *known)
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r:.80}", param=name
                )
        if self.max_log_len and not self.enable_log_requests:
            raise ConfigError("max_log_len needs enable_log_requests, or it says nothing", param="max_log_len")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_traces_endpoint must be a URL for OTLP over HTTP, like http://localhost:4318/v1/traces, not "
                f"{endpoint!r:.80}",
                param="otlp_traces_endpoint",
            )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "allow_credentials needs allowed_origins that are named: with '*' any page could use what a visitor's "
                "browser knows",
                param="allow_credentials",
            )
        if self.engine.skip_tokenizer_init:
            raise ConfigError(
                "skip_tokenizer_init cannot be used by a server, which speaks text; use it with sol.LLM",
                param="skip_tokenizer_init",
            )

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.served_model_names or (self.engine.model,)
