from __future__ import annotations

import threading

import pytest
from token_runner import FailingRunner, expected_output, make_config, make_core, make_request

from sol.engine.client import InProcessClient
from sol.errors import EngineDeadError


def test_in_process_client_runs_a_step_for_each_receive() -> None:
    client = InProcessClient(make_core())
    request = make_request("a", [1, 2], max_tokens=4)
    client.add([request])
    tokens: list[int] = []
    while True:
        (output,) = client.receive().outputs
        tokens += output.new_token_ids
        if output.finish_reason is not None:
            break
    assert tokens == expected_output(request, client.info.max_model_len)[0]


def test_receive_blocks_until_something_is_added() -> None:
    client = InProcessClient(make_core())
    received = []
    thread = threading.Thread(target=lambda: received.append(client.receive()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    client.add([make_request("a", [1])])
    thread.join(20)
    assert received[0].outputs[0].request_id == "a"


def test_an_abort_of_nothing_wakes_receive_with_nothing() -> None:
    client = InProcessClient(make_core())
    client.abort(["unknown"])
    assert client.receive().outputs == []


def test_close_wakes_receive() -> None:
    client = InProcessClient(make_core())
    errors = []

    def receive() -> None:
        with pytest.raises(EngineDeadError, match="closed") as caught:
            client.receive()
        errors.append(caught.value)

    thread = threading.Thread(target=receive)
    thread.start()
    client.close()
    client.close()
    thread.join(20)
    assert errors
    with pytest.raises(EngineDeadError, match="closed"):
        client.add([make_request("a", [1])])
    client.abort(["a"])


def test_a_dead_core_refuses_requests() -> None:
    config = make_config()
    client = InProcessClient(make_core(config, FailingRunner(config)))
    client.add([make_request("a", [1], max_tokens=5)])
    client.receive()
    assert client.receive().outputs[0].finish_reason == "error"
    for call in (client.receive, lambda: client.add([make_request("b", [1])])):
        with pytest.raises(EngineDeadError, match="out of luck"):
            call()
