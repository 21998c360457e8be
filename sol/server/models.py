"""`/v1/models`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sol.server.state import ServerState


async def list_models(request: Request) -> Response:
    state: ServerState = request.app.state.sol
    return JSONResponse({"object": "list", "data": [_card(state, name) for name in state.config.model_names]})


async def retrieve_model(request: Request) -> Response:
    state: ServerState = request.app.state.sol
    return JSONResponse(_card(state, state.check_model_name(request.path_params["name"])))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    info = state.model.info
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "sol",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_model_len,
        "drafters": info.drafters,
    }
