"""Example: sol serve meta-llama/Meta-Llama-3-8B-Instruct --port 9000 --api-key SECRET"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sol.cli.arguments import add_engine_arguments, add_model_argument, engine_config, whole_number
from sol.config import flag_options
from sol.errors import ConfigError

if TYPE_CHECKING:
    from sol.server.app import ServerReady
    from sol.server.config import ServerConfig

_PROMPT = "Name the capital of France."

_SERVER_OPTIONS = {
    "host": "host", "port": "port", "served_model_name": "served_model_names", "api_key": "api_keys",
    "allowed_origins": "allowed_origins", "allowed_methods": "allowed_methods", "allowed_headers": "allowed_headers",
    "allow_credentials": "allow_credentials", "max_queue_len": "max_queue_len", "drain_timeout": "drain_timeout",
    "restart_engine": "restart_engine", "max_stored_responses": "max_stored_responses",
    "tool_call_parser": "tool_call_parser", "enable_auto_tool_choice": "enable_auto_tool_choice",
    "reasoning_parser": "reasoning_parser",
    "log_format": "log_format", "enable_log_requests": "enable_log_requests", "max_log_len": "max_log_len",
    "otlp_traces_endpoint": "otlp_traces_endpoint",
}  # fmt: skip
"""Options that are the server's and not the engine's, and the fields of `ServerConfig` that they are."""

_LOG_FORMATS = ("text", "json")
_TOOL_CALL_PARSERS = ("auto", "none", "hermes", "llama3_json", "mistral")
_REASONING_PARSERS = ("auto", "none", "deepseek_r1", "qwen3")
"""As in `sol.text.answer_format`, which is not imported to show flags."""
_WHOLE = ((int,), "a whole number")
_PLAIN_OPTIONS: dict[str, tuple[tuple[type, ...], str]] = {
    "host": ((str,), "an address"), "port": _WHOLE, "max_queue_len": _WHOLE, "restart_engine": _WHOLE,
    "max_stored_responses": _WHOLE, "max_log_len": _WHOLE, "enable_log_requests": ((bool,), "true or false"),
    "log_format": ((str,), "text or json"), "otlp_traces_endpoint": ((str,), "a URL"),
    "tool_call_parser": ((str,), "a name"), "enable_auto_tool_choice": ((bool,), "true or false"),
    "reasoning_parser": ((str,), "a name"), "drain_timeout": ((int, float), "a number of seconds"),
    "allow_credentials": ((bool,), "true or false"),
}  # fmt: skip
"""Those that are not words: the types of their values, and what they are called."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    # Flags that are not given are left out, so that a file's values show through.
    absent: Any = argparse.SUPPRESS
    parser.add_argument(
        "--config", type=Path, metavar="FILE",
        help="YAML, or JSON (.json), with options by the names of the flags, which stand above it; sol tune writes one",
    )  # fmt: skip
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default=absent,
        help="address to listen on; 0.0.0.0 opens the server to the network (default: 127.0.0.1, this machine only)",
    )  # fmt: skip
    group.add_argument("--port", type=int, default=absent, help="0 takes a free one (default: 8000)")
    group.add_argument(
        "--served-model-name", nargs="+", action="extend", default=absent, metavar="NAME",
        help="what clients call the model; several may be given, and the first appears in responses (default: MODEL)",
    )  # fmt: skip
    group.add_argument(
        "--api-key", nargs="+", action="extend", default=absent, metavar="KEY",
        help="ask clients for this key; several may be given (default: ask for none)",
    )  # fmt: skip
    for name, text in (
        ("origins", "web pages of these origins may call the API from a browser; '*': of all (default: none)"),
        ("methods", "with --allowed-origins: the methods they may use (default: all)"),
        ("headers", "with --allowed-origins: the headers they may send (default: all)"),
    ):
        group.add_argument(
            f"--allowed-{name}", nargs="+", action="extend", default=absent, metavar=name.upper(), help=text
        )
    group.add_argument(
        "--allow-credentials", action=argparse.BooleanOptionalAction, default=absent,
        help="with --allowed-origins: they may send cookies and the like (default: no)",
    )  # fmt: skip
    group.add_argument(
        "--max-queue-len", type=whole_number, default=absent, metavar="N",
        help="most requests that wait for a place in the batch; more get a 503 at once (default: 4096)",
    )  # fmt: skip
    group.add_argument(
        "--drain-timeout", type=float, default=absent, metavar="SECONDS",
        help="how long open requests may take to finish after SIGTERM (default: 25)",
    )  # fmt: skip
    group.add_argument(
        "--restart-engine", type=whole_number, default=absent, metavar="N",
        help="start an engine that died or hangs again, so many times in ten minutes at most (default: 0, never)",
    )  # fmt: skip
    group.add_argument(
        "--max-stored-responses", type=whole_number, default=absent, metavar="N",
        help="how many answers of /v1/responses are kept, to be gone on from; the newest (default: 1000)",
    )  # fmt: skip
    group.add_argument(
        "--tool-call-parser", choices=_TOOL_CALL_PARSERS, default=absent,
        help="in what form the model calls tools (default: auto, as its chat template shows)",
    )  # fmt: skip
    group.add_argument(
        "--enable-auto-tool-choice", action=argparse.BooleanOptionalAction, default=absent,
        help="the model may choose to call tools (default: yes, if it is known how it does)",
    )  # fmt: skip
    group.add_argument(
        "--reasoning-parser", choices=_REASONING_PARSERS, default=absent,
        help="how the model marks its reasoning, which is told apart from the content (default: auto, as its chat "
        "template shows)",
    )  # fmt: skip
    group.add_argument(
        "--log-format", choices=_LOG_FORMATS, default=absent, help="of the log, on stderr (default: text)"
    )
    group.add_argument(
        "--enable-log-requests", action=argparse.BooleanOptionalAction, default=absent,
        help="log a line for each request that was answered, without its text (default: no)",
    )  # fmt: skip
    group.add_argument(
        "--max-log-len", type=whole_number, default=absent, metavar="N",
        help="with --enable-log-requests: log so many characters of each prompt (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--otlp-traces-endpoint", default=absent, metavar="URL",
        help="send OpenTelemetry spans of requests there, like http://localhost:4318/v1/traces (default: nowhere)",
    )  # fmt: skip
    add_engine_arguments(parser, absent=True)


def run(args: argparse.Namespace) -> int:
    config, log_format = _read_options(args)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")  # on stderr
    logging.getLogger("sol").setLevel(logging.INFO)
    if log_format == "json":
        from sol.server.observe import JsonFormatter

        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())

    from sol.server.app import serve

    def announce(ready: ServerReady) -> None:
        # A log is read by more people than a terminal: there a key is not written out.
        key = None if not config.api_keys else config.api_keys[0] if sys.stdout.isatty() else "KEY"
        model, info = ready.model_names[0], ready.info
        print(
            f"\n{model} is ready at {ready.url} after {ready.seconds:.1f} s: {info.device}, {info.dtype}, "
            f"up to {info.max_model_len:,} tokens a request.\n\nIn a shell:\n\n"
            f"{curl_line(ready.url, model, key)}\n\nIn Python:\n\n{python_snippet(ready.url, model, key)}",
            flush=True,
        )

    def listen(url: str) -> None:
        print(f"{url} listens; loading {config.engine.model}", file=sys.stderr, flush=True)

    return serve(config, on_listening=listen, on_ready=announce)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Flags, and below them the options of `--config`. Raises `ConfigError` for values that cannot work."""
    return _read_options(args)[0]


def _read_options(args: argparse.Namespace) -> tuple[ServerConfig, str]:
    """The configuration and the log's format."""
    from sol.option_files import read_options
    from sol.server.config import ServerConfig

    file = {} if args.config is None else read_options(args.config)
    engine = {option.name for option in flag_options()} - {"skip_tokenizer_init"}
    for name in file:
        if name not in engine | _SERVER_OPTIONS.keys():
            raise ConfigError(f"{args.config} has an option {name!r:.80} that sol serve does not have: remove it, or "
                              "correct its name", param=name[:80])  # fmt: skip
    given = {name: vars(args).get(name, file.get(name)) for name in _SERVER_OPTIONS}
    server = {}
    for name, value in given.items():
        if value is not None:
            server[_SERVER_OPTIONS[name]] = _server_value(name, value)
    log_format = server.pop("log_format", "text")
    if log_format not in _LOG_FORMATS:
        raise ConfigError(
            f"log_format must be one of {', '.join(_LOG_FORMATS)}, not {log_format!r:.80}", param="log_format"
        )
    return ServerConfig(engine=engine_config(args, file), **server), log_format


def _server_value(name: str, value: Any) -> Any:
    """As `ServerConfig` takes it. Raises `ConfigError`."""
    if name in _PLAIN_OPTIONS:
        kinds, allowed = _PLAIN_OPTIONS[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"{name} must be {allowed}, not {value!r:.80}", param=name)
        return value
    words = [value] if isinstance(value, str) else value
    if name.startswith("allowed_") and isinstance(words, list) and len(words) == 1 and str(words[0]).startswith("["):
        try:
            words = json.loads(words[0])  # as vLLM's command lines have them
        except ValueError as error:
            raise ConfigError(f"{name}: {words[0]!r:.80} is not JSON ({error})", param=name) from None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        shown = "what was given" if name == "api_key" else f"{value!r:.80}"
        raise ConfigError(f"{name} must be a string or a list of strings, not {shown}", param=name)
    return tuple(words)


def _body(model: str) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": _PROMPT}], "temperature": 0}


def curl_line(url: str, model: str, api_key: str | None) -> str:
    """A chat request, ready to paste into a shell."""
    words = ["curl", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    if api_key is not None:
        words += ["-H", f"Authorization: Bearer {api_key}"]
    return shlex.join([*words, "-d", json.dumps(_body(model), ensure_ascii=False)])


def python_snippet(url: str, model: str, api_key: str | None) -> str:
    """The same request as a Python program that needs no package."""
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return (
        f"import json, urllib.request\n"
        f"body = {_body(model)!r}\n"
        f"request = urllib.request.Request({url + '/v1/chat/completions'!r}, json.dumps(body).encode(),\n"
        f"                                 {headers!r})\n"
        f'print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])\n'
    )
