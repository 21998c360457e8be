"""What a server says before its model is loaded, and what never needs one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from sol.server.config import ServerConfig
from sol.server.middleware import RequestIdMiddleware
from sol.server.routes import create_app
from sol.server.state import ServerState
from sol.version import __version__

KEY = "k" * 32


@pytest.fixture
def state() -> ServerState:
    return ServerState(ServerConfig(api_keys=(KEY, "other"), served_model_names=("m",)))


@pytest.fixture
async def http(state: ServerState) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(state))
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://sol", headers=headers) as client:
        yield client


@pytest.mark.parametrize("path", ["/ready", "/health", "/ping", "/v1/models", "/v1/models/m"])
async def test_a_loading_server_asks_for_patience(http: httpx.AsyncClient, path: str) -> None:
    response = await http.get(path)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_not_ready"
    assert int(response.headers["retry-after"]) > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_work_is_turned_away_while_loading(http: httpx.AsyncClient, path: str) -> None:
    response = await http.post(path, content=b"{")
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "service_unavailable_error"


async def test_a_stopping_server_turns_work_away(http: httpx.AsyncClient, state: ServerState) -> None:
    state.stopping.set()
    response = await http.get("/ready")
    assert response.status_code == 503
    assert "shutting down" in response.json()["error"]["message"]
    assert (await http.get("/live")).status_code == 200


async def test_a_loading_server_lives(http: httpx.AsyncClient) -> None:
    assert (await http.get("/live")).status_code == 200
    assert (await http.get("/version")).json() == {"version": __version__}
    metrics = (await http.get("/metrics")).text
    assert 'sol:engine_alive{model_name="m"} 0.0' in metrics


async def test_unknown_urls_and_methods_are_errors_of_the_usual_shape(http: httpx.AsyncClient) -> None:
    response = await http.get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_allowed"
    for path in ("/nowhere", "/v1/models/", "/v1/nowhere"):
        response = await http.get(path)
        assert response.status_code == 404, path
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_keys(http: httpx.AsyncClient) -> None:
    for header in ("", "Bearer", "Bearer ", f"Basic {KEY}", "Bearer wrong", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"):
        for path in ("/v1/models", "/v1/nowhere", "/tokenize", "/detokenize"):
            response = await http.get(path, headers={"authorization": header})
            assert response.status_code == 401, (header, path)
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
    for header in (f"Bearer {KEY}", "bearer other", "Bearer  other"):
        assert (await http.get("/v1/nowhere", headers={"authorization": header})).status_code == 404
    for path in ("/live", "/version", "/metrics"):
        assert (await http.get(path, headers={"authorization": ""})).status_code == 200
    assert (await http.get("/health", headers={"authorization": ""})).status_code == 503


async def test_errors_are_counted(http: httpx.AsyncClient, state: ServerState) -> None:
    await http.get("/nowhere")
    await http.get("/v1/models", headers={"authorization": "Bearer wrong"})
    metrics = state.metrics.render().decode()
    assert 'sol:request_errors_total{code="unknown_url",model_name="m",status="404"} 1.0' in metrics
    assert 'sol:request_errors_total{code="invalid_api_key",model_name="m",status="401"} 1.0' in metrics


@pytest.mark.parametrize("sent", ["abc-123", "a" * 128])
async def test_a_sane_request_id_comes_back(http: httpx.AsyncClient, sent: str) -> None:
    for path in ("/live", "/nowhere"):
        assert (await http.get(path, headers={"x-request-id": sent})).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "a" * 129, "a b", "a\tb", "<script>"])
async def test_an_odd_request_id_is_replaced(http: httpx.AsyncClient, sent: str) -> None:
    ids = {(await http.get("/live", headers={"x-request-id": sent})).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert sent not in ids


async def test_what_nobody_caught_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: object, receive: object, send: object) -> None:
        raise RuntimeError("the secret is 42")

    transport = httpx.ASGITransport(RequestIdMiddleware(broken))
    async with httpx.AsyncClient(transport=transport, base_url="http://sol") as client:
        response = await client.get("/", headers={"x-request-id": "abc"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "abc"
    assert response.json()["error"]["type"] == "internal_server_error"
    assert "42" not in response.text
    assert "the secret is 42" in caplog.text
