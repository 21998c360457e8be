from __future__ import annotations

import os
import threading

import msgspec
import pytest
from token_runner import logprobs_of, make_request

from sol.config import EngineConfig
from sol.engine import wire
from sol.engine.types import (
    DraftCounts,
    DrafterStats,
    EngineOutput,
    EngineStats,
    RequestOutput,
    SpeculationParams,
    SpeculationUsage,
)
from sol.errors import CheckpointError, ConfigError, EngineDeadError


def test_start_up_message_is_read_in_pieces() -> None:
    config = EngineConfig(seed=5, speculative_config={"method": "ngram", "prompt_lookup_max": 4})
    message = wire.StartUp(config, "d", "i", "o")
    read, write = os.pipe()
    data = wire.encode_start_up(message)

    def feed() -> None:
        for index in range(len(data)):
            os.write(write, data[index : index + 1])
        os.close(write)

    thread = threading.Thread(target=feed)
    thread.start()
    assert wire.read_start_up(read) == message
    with pytest.raises(EOFError):
        wire.read_start_up(read)
    thread.join()
    os.close(read)


def test_requests_survive_the_wire() -> None:
    requests = [
        make_request("a", [1, 2**20], logit_bias={7: -0.5}, seed=2**63, top_k=3, stop=["x", "y"]),
        make_request("b", [3], choice_index=4, eos=True, max_tokens=None, logprobs=20),
    ]
    requests[1].speculation = SpeculationParams(enabled=False, drafter="ngram", tenant="t", include_origins=True)
    message = wire.decode_to_engine(wire.encode_requests(requests))
    assert isinstance(message, wire.AddRequests)
    assert [encoded.request_id for encoded in message.requests] == ["a", "b"]
    assert [wire.decode_request(encoded) for encoded in message.requests] == requests


def test_a_request_that_does_not_decode_does_not_spoil_its_message() -> None:
    bad = make_request("bad", [1])
    bad.seed = "seed"  # type: ignore[assignment]
    message = wire.decode_to_engine(wire.encode_requests([bad, make_request("good", [1])]))
    assert isinstance(message, wire.AddRequests)
    with pytest.raises(msgspec.ValidationError, match="seed"):
        wire.decode_request(message.requests[0])
    assert wire.decode_request(message.requests[1]).request_id == "good"


def test_outputs_survive_the_wire() -> None:
    output = RequestOutput(
        request_id="a",
        new_token_ids=[1, 2],
        logprobs=[logprobs_of(1, 2), logprobs_of(2, 2)],
        finish_reason="stop",
        stop_token_id=2,
        first_token_time=1.5,
        origins=["suffix", "target"],
        speculation=SpeculationUsage(num_steps=1, drafters={"suffix": DraftCounts(num_drafts=1)}, speedup=1.5),
    )
    drafters = {"suffix": DrafterStats(num_drafts=1, num_drafted_per_position=[1, 1], seconds=0.5)}
    stats = EngineStats(num_running=3, kv_cache_usage=0.25, drafters=drafters, plain_seconds=0.5)
    message = wire.Output(EngineOutput(outputs=[output], stats=stats))
    assert wire.decode_from_engine(wire.encode(message)) == message


@pytest.mark.parametrize("error", [ConfigError("no", param="seed"), CheckpointError("a tensor is missing")])
def test_start_up_errors_of_sol_survive_the_wire(error: ConfigError | CheckpointError) -> None:
    message = wire.decode_from_engine(wire.encode(wire.Failed.of(error)))
    assert isinstance(message, wire.Failed)
    again = message.to_error()
    assert type(again) is type(error)
    assert (again.message, again.param) == (error.message, error.param)


@pytest.mark.parametrize("name", ["MemoryError", "annotations", "ClassVar"])
def test_other_start_up_errors_are_quoted(name: str) -> None:
    error = wire.Failed(error_class=name, message="too much", param=None).to_error()
    assert type(error) is EngineDeadError
    assert f"{name}: too much" in error.message
