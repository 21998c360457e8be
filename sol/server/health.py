"""Health, version and metrics. None of them waits for the engine, so none is slow when it is busy."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sol.engine.types import EngineStats
from sol.server import metrics
from sol.server.errors import error_response
from sol.server.state import ServerState
from sol.version import __version__


async def live(request: Request) -> Response:
    """503 when only a restart helps: the engine's process is gone, or has been silent for long while work is open."""
    state: ServerState = request.app.state.sol
    reason = state.why_not_alive()
    return JSONResponse({"status": "ok"}) if reason is None else error_response(reason)


async def ready(request: Request) -> Response:
    """503 when work would be turned away: loading, stopping or dead. `/health` and `/ping` are the same."""
    state: ServerState = request.app.state.sol
    reason = state.why_not_ready()
    return JSONResponse({"status": "ok"}) if reason is None else error_response(reason)


async def load(request: Request) -> Response:
    """vLLM's: how many requests for work are open."""
    return JSONResponse({"server_load": request.app.state.sol.num_open})


async def usage(request: Request) -> Response:
    """Of a request that was abandoned (`sol.server.usages`)."""
    state: ServerState = request.app.state.sol
    found = state.usages.take(request.path_params["key"])
    if found is None:
        # No error that anybody should count: who asks before the request has ended asks again.
        message = "there is no ended request with this key, or no more"
        error = {"message": message, "type": "not_found_error", "param": None, "code": None}
        return JSONResponse({"error": error}, status_code=404)
    return JSONResponse({"usage": found})


async def version(_request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def scrape(request: Request) -> Response:
    state: ServerState = request.app.state.sol
    state.metrics.set_alive(state.is_loaded and state.why_not_alive() is None)
    if state.is_dead:
        state.metrics.observe_stats(EngineStats())  # nothing runs, waits or holds blocks any more
    return Response(state.metrics.render(), media_type=metrics.CONTENT_TYPE)
