"""Which path does what: OpenAI's surface, probes and metrics, and the simulator's own control."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import Any, Final

from sol.errors import ConfigError, RequestError, SolError
from sol.server.errors import error_body
from sol.server.metrics import CONTENT_TYPE
from sol.server.parsing import parse
from sol.server.protocol import DetokenizeBody, TokenizeBody
from sol.simulate import vocabulary
from sol.simulate.faults import GENERATING, parse_fault
from sol.simulate.generation import respond_error
from sol.simulate.http import Exchange
from sol.simulate.service import Service
from sol.text.messages import flatten_messages
from sol.version import __version__

logger = logging.getLogger("sol.simulate")

Route = Callable[[Exchange], None]

_SANE_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_USAGE: Final = "/v1/usage/"
_FAULT_PATH: Final = re.compile(r"/simulate/faults/([0-9]{1,18})")


class Routes:
    """`on_faults` is called after faults were set or removed."""

    def __init__(self, service: Service, on_faults: Callable[[], None]) -> None:
        self._service = service
        self._on_faults = on_faults
        self._control: dict[str, dict[str, Route]] = {
            "/simulate/faults": {"GET": self._list_faults, "POST": self._set_faults, "DELETE": self._clear_faults},
            "/simulate/state": {"GET": self._state},
            "/simulate/requests": {"GET": self._requests, "DELETE": self._forget_requests},
        }
        self._all: dict[str, dict[str, Route]] = {
            "/v1/chat/completions": {"POST": service.generate},
            "/v1/completions": {"POST": service.generate},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/live": {"GET": self._live},
            "/health": {"GET": self._ready},
            "/ready": {"GET": self._ready},
            "/ping": {"GET": self._ready},
            "/version": {"GET": lambda exchange: _json(exchange, {"version": __version__})},
            "/metrics": {"GET": self._metrics},
            **self._control,
        }

    def handle(self, exchange: Exchange) -> None:
        """On the port for clients."""
        self._handle(exchange, self._all)

    def handle_control(self, exchange: Exchange) -> None:
        """On the control port, which no fault touches."""
        exchange.on_control_port = True
        self._handle(exchange, self._control)

    def _handle(self, exchange: Exchange, table: dict[str, dict[str, Route]]) -> None:
        sent = exchange.headers.get("x-request-id", "")
        request_id = sent if _SANE_REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        exchange.request_id = request_id
        exchange.extra_headers.append(("x-request-id", request_id))
        path = exchange.path
        methods = table.get(path)
        if methods is None and table is self._all and path.startswith("/v1/models/"):
            methods = {"GET": self._model}
        elif methods is None and table is self._all and path.startswith(_USAGE):
            methods = {"GET": self._usage}
        elif methods is None and _FAULT_PATH.fullmatch(path):
            methods = {"DELETE": self._remove_fault}
        if methods is None:
            _fail(exchange, 404, "not_found_error", "unknown_url", f"there is no {path[:200]} here")
            return
        method = "GET" if exchange.method == "HEAD" else exchange.method
        route = methods.get(method)
        if route is None:
            message = f"{path} does not take {exchange.method}; use {' or '.join(methods)}"
            _fail(exchange, 405, "invalid_request_error", "method_not_allowed", message)
            return
        try:
            if path not in GENERATING and path not in self._control and not _FAULT_PATH.fullmatch(path):
                _, stopped = self._service.meet_faults(exchange)
                if stopped:
                    return
            route(exchange)
        except ConfigError as error:  # of a fault that was posted: the client's mistake here, not the server's
            respond_error(exchange, RequestError(error.message, param=error.param))
        except SolError as error:
            respond_error(exchange, error)
        except Exception:
            logger.exception("unexpected error")
            if exchange.started:
                exchange.cut()
            else:
                message = "the simulator failed to handle this request; its log says why"
                _fail(exchange, 500, "internal_server_error", None, message)

    def _models(self, exchange: Exchange) -> None:
        names = self._service.config.served_model_names
        _json(exchange, {"object": "list", "data": [self._card(name) for name in names]})

    def _model(self, exchange: Exchange) -> None:
        name = self._service.check_model(exchange.path.removeprefix("/v1/models/"))
        _json(exchange, self._card(name))

    def _usage(self, exchange: Exchange) -> None:
        found = self._service.usages.take(exchange.path.removeprefix(_USAGE))
        if found is None:
            _fail(exchange, 404, "not_found_error", None, "there is no ended request with this key, or no more")
        else:
            _json(exchange, {"usage": found})

    def _card(self, name: str) -> dict[str, Any]:
        reason = self._service.why_not_ready()
        if reason is not None:
            raise reason
        laws = self._service.config.laws
        return {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "sol-simulate",
            "root": name,
            "parent": None,
            "max_model_len": laws.max_model_len,
        }

    def _tokenize(self, exchange: Exchange) -> None:
        body = parse(exchange.body, TokenizeBody)
        self._service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("send either prompt or messages", param="prompt")
        if body.chat_template_kwargs:
            raise RequestError("chat_template_kwargs is not simulated; remove it", param="chat_template_kwargs")
        if body.messages is not None:
            token_ids = vocabulary.encode_chat(
                flatten_messages(body.messages), add_generation_prompt=body.add_generation_prompt is not False
            )
        elif body.add_generation_prompt is not None:
            raise RequestError(
                "add_generation_prompt goes with messages, not with a prompt", param="add_generation_prompt"
            )
        else:
            token_ids = vocabulary.encode(body.prompt or "")
        words = [vocabulary.decode([token_id]) for token_id in token_ids] if body.return_token_strs else None
        limit = self._service.config.laws.max_model_len
        _json(exchange, {"count": len(token_ids), "max_model_len": limit, "tokens": token_ids, "token_strs": words})

    def _detokenize(self, exchange: Exchange) -> None:
        body = parse(exchange.body, DetokenizeBody)
        self._service.check_model(body.model)
        for token_id in body.tokens:
            if not 0 <= token_id < vocabulary.VOCAB_SIZE:
                raise RequestError(
                    f"tokens must be token ids from 0 to {vocabulary.VOCAB_SIZE - 1}, not {token_id}", param="tokens"
                )
        _json(exchange, {"prompt": vocabulary.decode(body.tokens)})

    def _live(self, exchange: Exchange) -> None:
        _json(exchange, {"status": "ok"})

    def _ready(self, exchange: Exchange) -> None:
        reason = self._service.why_unhealthy()
        if reason is not None:
            raise reason
        _json(exchange, {"status": "ok"})

    def _metrics(self, exchange: Exchange) -> None:
        exchange.respond(200, self._service.render_metrics(), CONTENT_TYPE)

    def _list_faults(self, exchange: Exchange) -> None:
        now = time.monotonic()
        _json(exchange, {"faults": [active.as_dict(now) for active in self._service.faults.all()]})

    def _set_faults(self, exchange: Exchange) -> None:
        """One fault, a list of them, or `{"faults": […], "replace": true}`."""
        try:
            data = json.loads(exchange.body)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not valid JSON: {error}") from None
        replace = False
        if isinstance(data, dict) and "kind" not in data:
            unknown = data.keys() - {"faults", "replace"}
            if unknown or "faults" not in data:
                raise RequestError(
                    "the body must be a fault with its kind, a list of faults, or an object with faults and replace",
                    param=min(unknown, default="faults"),
                )
            replace = data.get("replace", False)
            if not isinstance(replace, bool):
                raise RequestError(f"replace must be true or false, not {replace!r:.80}", param="replace")
            data = data["faults"]
        faults = [parse_fault(item) for item in (data if isinstance(data, list) else [data])]
        now = time.monotonic()
        if replace:
            self._service.faults.clear()
        added = self._service.faults.add(faults, now)
        result = {"faults": [active.as_dict(now) for active in added]}
        # What was asked for is so when its answer comes; but a crash would take the answer with it.
        if any(fault.kind == "crash" for fault in faults) and not exchange.on_control_port:
            _json(exchange, result)
            self._on_faults()
        else:
            self._on_faults()
            _json(exchange, result)

    def _clear_faults(self, exchange: Exchange) -> None:
        self._service.faults.clear()
        self._on_faults()
        _json(exchange, {"faults": []})

    def _remove_fault(self, exchange: Exchange) -> None:
        match = _FAULT_PATH.fullmatch(exchange.path)
        if match is None or not self._service.faults.remove(int(match[1])):
            _fail(exchange, 404, "not_found_error", "unknown_fault", "there is no fault with this id; GET lists them")
            return
        self._on_faults()
        self._list_faults(exchange)

    def _state(self, exchange: Exchange) -> None:
        service, now = self._service, time.monotonic()
        engine = service.engine
        reason = service.why_not_ready()
        _json(
            exchange,
            {
                "now": now,
                "ready": reason is None,
                "healthy": service.why_unhealthy() is None,
                "num_received": service.num_received,
                "num_open": service.num_open,
                "num_running": engine.num_running,
                "num_waiting": engine.num_waiting,
                "kv_cache_usage": engine.pool.usage,
                "counters": dataclasses.asdict(engine.counters),
                "laws": dataclasses.asdict(service.config.laws),
                "text": dataclasses.asdict(service.config.text),
            },
        )

    def _requests(self, exchange: Exchange) -> None:
        _json(exchange, {"requests": list(self._service.records)})

    def _forget_requests(self, exchange: Exchange) -> None:
        self._service.records.clear()
        _json(exchange, {"requests": []})


def _json(exchange: Exchange, data: object) -> None:
    exchange.respond(200, json.dumps(data).encode(), "application/json")


def _fail(exchange: Exchange, status: int, kind: str, code: str | None, message: str) -> None:
    error = error_body(SolError(message))
    error["error"].update(type=kind, code=code)
    exchange.respond(status, json.dumps(error).encode(), "application/json")
