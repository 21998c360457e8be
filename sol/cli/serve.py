"""Example: sol serve meta-llama/Meta-Llama-3-8B-Instruct --port 9000 --api-key SECRET"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
from typing import TYPE_CHECKING

from sol.cli.arguments import add_engine_arguments, add_model_argument, engine_config

if TYPE_CHECKING:
    from sol.server.app import ServerReady
    from sol.server.config import ServerConfig

_PROMPT = "Name the capital of France."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1",
        help="address to listen on; 0.0.0.0 opens the server to the network (default: 127.0.0.1, this machine only)",
    )  # fmt: skip
    group.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    group.add_argument(
        "--served-model-name", nargs="+", action="extend", default=[], metavar="NAME",
        help="what clients call the model; several may be given, and the first appears in responses (default: MODEL)",
    )  # fmt: skip
    group.add_argument(
        "--api-key", nargs="+", action="extend", default=[], metavar="KEY",
        help="ask clients for this key; several may be given (default: ask for none)",
    )  # fmt: skip
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = server_config(args)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")  # on stderr
    logging.getLogger("sol").setLevel(logging.INFO)

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
    """Raises `ConfigError` for values that cannot work."""
    from sol.server.config import ServerConfig

    return ServerConfig(
        engine=engine_config(args),
        host=args.host,
        port=args.port,
        served_model_names=tuple(args.served_model_name),
        api_keys=tuple(args.api_key),
    )


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
