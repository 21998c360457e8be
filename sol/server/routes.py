"""The routes, put together."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from sol.errors import SolError
from sol.server import health, models
from sol.server.chat import chat_completions
from sol.server.completions import completions
from sol.server.config import ServerConfig
from sol.server.errors import handle_disconnect, handle_error, handle_http_exception
from sol.server.middleware import ApiKeyMiddleware, RequestIdMiddleware, WorkMiddleware
from sol.server.observe import ObserveMiddleware, Observer
from sol.server.openapi import openapi
from sol.server.page import page
from sol.server.responses import create_response, delete_response, retrieve_response
from sol.server.state import ServerState
from sol.server.tokenize import detokenize, tokenize


def create_app(state: ServerState, observers: Sequence[Observer] = ()) -> Starlette:
    """An ASGI application; `observers` are told of every request for work.

    `sol.server.app` gives it a port, a loaded model and an end."""
    app = Starlette(
        routes=[
            Route("/", page),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/responses", create_response, methods=["POST"]),
            Route("/v1/responses/{response_id}", retrieve_response, methods=["GET"]),
            Route("/v1/responses/{response_id}", delete_response, methods=["DELETE"]),
            Route("/v1/models", models.list_models),
            Route("/v1/models/{name:path}", models.retrieve_model),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/live", health.live),
            Route("/ready", health.ready),
            Route("/health", health.ready),
            Route("/ping", health.ready),
            Route("/v1/usage/{key}", health.usage),
            Route("/version", health.version),
            Route("/load", health.load),
            Route("/metrics", health.scrape),
            Route("/openapi.json", openapi),
        ],
        middleware=[
            Middleware(RequestIdMiddleware),
            *([Middleware(ObserveMiddleware, observers)] if observers else []),
            *_cors(state.config),
            Middleware(WorkMiddleware),
            Middleware(ApiKeyMiddleware, state.config.api_keys),
        ],
        exception_handlers={
            SolError: handle_error,
            HTTPException: handle_http_exception,
            ClientDisconnect: handle_disconnect,
        },
    )
    app.router.redirect_slashes = False
    app.state.sol = state
    return app


def _cors(config: ServerConfig) -> list[Middleware]:
    """Before the API key is asked for: browsers ask what is allowed without one."""
    if not config.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=("x-request-id", "retry-after"),
        )
    ]
