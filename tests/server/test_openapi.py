"""The OpenAPI document says what the server does: its routes, which values it takes, and what its answers look like."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from running_server import KEY, Server
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from sol.config import EngineConfig
from sol.errors import RequestError
from sol.server.config import ServerConfig
from sol.server.openapi import RANGES, openapi_document
from sol.server.params import chat_params, completion_params
from sol.server.parsing import parse
from sol.server.protocol import ChatBody, CompletionBody
from sol.server.responses_input import ResponsesBody, responses_params
from sol.server.routes import create_app
from sol.server.state import ServerState

load_all_checks()
DOCUMENT = openapi_document(with_keys=True)
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
MESSAGES = [{"role": "user", "content": "Hi"}]


def test_every_route_is_described_and_nothing_else() -> None:
    app = create_app(ServerState(ServerConfig(engine=EngineConfig())))
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert routes == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}


def test_every_field_has_a_form() -> None:
    anything = {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    for name, schema in SCHEMAS.items():
        for field, form in schema.get("properties", {}).items():
            assert set(form) - {"default"} or field in anything | {"parallel_tool_calls"}, (name, field)


def test_every_schema_is_valid_and_every_reference_leads_somewhere() -> None:
    for name in SCHEMAS:
        whole = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
        jsonschema_rs.meta.validate(whole)
        jsonschema_rs.validator_for(whole)


@pytest.mark.parametrize("field", sorted(RANGES))
def test_ranges_are_those_that_are_checked(field: str) -> None:
    """Their ends are taken, what lies beyond is refused."""
    if field in CompletionBody.model_fields:
        body_type, needed, params = CompletionBody, {"prompt": "Hi", "echo": True}, completion_params
    elif field in ChatBody.model_fields:
        body_type, needed, params = ChatBody, {"messages": MESSAGES, "logprobs": True}, chat_params  # type: ignore[assignment]
    else:
        body_type, needed, params = ResponsesBody, {"input": "Hi"}, responses_params  # type: ignore[assignment]

    def takes(value: float) -> bool:
        try:
            params(parse(json.dumps({**needed, field: value}).encode(), body_type))  # type: ignore[arg-type]
        except RequestError as error:
            if error.param != field:
                raise
            return False
        return True

    form = RANGES[field]
    step = 1 if all(isinstance(value, int) for value in form.values()) else 0.5
    if field == "priority":  # the range is checked with the request's headers: test_server_life.py
        return
    if "minimum" in form:
        assert takes(form["minimum"])
        assert not takes(form["minimum"] - step)
    if "exclusiveMinimum" in form:
        assert not takes(form["exclusiveMinimum"])
        assert takes(form["exclusiveMinimum"] + 1e-6)
    if "maximum" in form:
        assert takes(form["maximum"])
        assert not takes(form["maximum"] + step)


def validated(short_server: Server, method: str, path: str, route: str | None = None, **body: Any) -> dict[str, Any]:
    """An answer of 200, of the described form."""
    response = short_server.http.request(method, path, json=body or None)
    assert response.status_code == 200, response.text
    answer = DOCUMENT["paths"][route or path][method.lower()]["responses"]["200"]
    schema = answer["content"]["application/json"]["schema"]
    found: dict[str, Any] = response.json()
    jsonschema_rs.validate({**schema, "components": DOCUMENT["components"]}, found)
    return found


def test_answers_have_the_form_that_is_described(short_server: Server) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "n": 2, "prompt_logprobs": 1}
    validated(short_server, "POST", "/v1/chat/completions", **chat)
    completion = {"prompt": "Hi", "max_tokens": 3, "logprobs": 2, "echo": True, "prompt_logprobs": 0}
    validated(short_server, "POST", "/v1/completions", **completion)
    response = validated(short_server, "POST", "/v1/responses", input="Hi", max_output_tokens=3)
    path, route = f"/v1/responses/{response['id']}", "/v1/responses/{response_id}"
    assert validated(short_server, "GET", path, route) == response
    validated(short_server, "DELETE", path, route)
    validated(short_server, "GET", "/v1/models")
    validated(short_server, "GET", "/v1/models/tiny", "/v1/models/{name}")
    tokens = validated(short_server, "POST", "/tokenize", prompt="Hi", return_token_strs=True)["tokens"]
    validated(short_server, "POST", "/detokenize", tokens=tokens)
    for path in ("/live", "/ready", "/health", "/ping", "/version", "/load"):
        validated(short_server, "GET", path)
    with httpx.Client(base_url=short_server.url) as stranger:
        refused = stranger.get("/v1/models")
        assert refused.status_code == 401
        jsonschema_rs.validate({**SCHEMAS["Error"], "components": DOCUMENT["components"]}, refused.json())
        assert stranger.get("/openapi.json").json() == json.loads(json.dumps(DOCUMENT))


# Without the values at the edges of every field, of which there are hundreds.
few = schemathesis.openapi.from_dict(
    DOCUMENT, config=schemathesis.Config.from_dict({"phases": {"coverage": {"enabled": False}}})
)
many = schemathesis.openapi.from_dict(DOCUMENT)


def check(case: schemathesis.Case[Any], short_server: Server) -> None:
    """No answer but those that are described, and no 5xx but for who asked for an answer within a moment."""
    response = case.call(base_url=short_server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
    late = response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"
    assert response.status_code < 500 or late, (response.status_code, response.text)
    case.validate_response(
        response, checks=[status_code_conformance, content_type_conformance, response_schema_conformance]
    )


@few.parametrize()
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_what_schemathesis_makes_of_the_document(case: schemathesis.Case[Any], short_server: Server) -> None:
    check(case, short_server)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@many.parametrize()
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_much_of_what_schemathesis_makes_of_the_document(case: schemathesis.Case[Any], short_server: Server) -> None:
    check(case, short_server)


def test_nothing_is_left_of_all_this(short_server: Server) -> None:
    short_server.wait_until_idle()
    assert short_server.http.get("/load").json() == {"server_load": 0}
    assert short_server.http.get("/ready").status_code == 200
