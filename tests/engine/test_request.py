from __future__ import annotations

import pytest
from token_runner import EOS, make_request

from sol.engine.request import make_request as accept
from sol.errors import ContextLengthError, RequestError


def test_a_prompt_must_leave_room_for_a_token() -> None:
    assert accept(make_request("r", [1] * 7), max_model_len=8, sequence=0).num_prompt_tokens == 7
    with pytest.raises(ContextLengthError, match="prompt has 8 tokens, but this model's length is 8") as caught:
        accept(make_request("r", [1] * 8), max_model_len=8, sequence=0)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="empty"):
        accept(make_request("r", []), max_model_len=8, sequence=0)


@pytest.mark.parametrize(("max_tokens", "limit"), [(2, 5), (None, 20), (99, 20)])
def test_the_limit_is_the_nearer_of_max_tokens_and_max_model_len(max_tokens: int | None, limit: int) -> None:
    assert (
        accept(make_request("r", [1, 2, 3], max_tokens=max_tokens), max_model_len=20, sequence=0).max_num_tokens
        == limit
    )


def test_the_callers_prompt_is_not_touched() -> None:
    prompt = [1, 2]
    accept(make_request("r", prompt), max_model_len=8, sequence=0).append(3)
    assert prompt == [1, 2]


def test_end_tokens() -> None:
    request = accept(make_request("r", [1], eos=True, max_tokens=9), max_model_len=99, sequence=0)
    assert request.append(5) is None
    assert request.append(EOS) == "stop"
    assert request.stop_token() is None


def test_ignore_eos_leaves_stop_tokens_alone() -> None:
    params = {"ignore_eos": True, "stop_token_ids": [7], "max_tokens": 9}
    request = accept(make_request("r", [1], eos=True, **params), max_model_len=99, sequence=0)
    assert request.append(EOS) is None
    assert request.append(7) == "stop"
    assert request.stop_token() == 7


def test_an_ignored_end_token_may_be_a_stop_token() -> None:
    params = {"ignore_eos": True, "stop_token_ids": [EOS], "max_tokens": 9}
    request = accept(make_request("r", [1], eos=True, **params), max_model_len=99, sequence=0)
    assert request.append(EOS) == "stop"
    assert request.stop_token() == EOS


def test_min_tokens_comes_first() -> None:
    params = {"stop_token_ids": [7], "min_tokens": 3, "max_tokens": 9}
    request = accept(make_request("r", [1], eos=True, **params), max_model_len=99, sequence=0)
    assert request.append(7) is None
    assert request.append(EOS) is None
    assert request.append(7) == "stop"


def test_length() -> None:
    request = accept(make_request("r", [1], max_tokens=2), max_model_len=99, sequence=0)
    assert request.append(5) is None
    assert request.append(5) == "length"
    request = accept(make_request("r", [1, 2], max_tokens=None, min_tokens=50), max_model_len=4, sequence=0)
    assert request.append(5) is None
    assert request.append(5) == "length"
