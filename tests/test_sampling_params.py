"""What may be asked for, under vLLM's names, and how the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sol.errors import RequestError
from sol.sampling_params import SamplingParams


def test_the_values_that_mean_none() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None, top_k=-1, seed=-1)  # type: ignore[arg-type]
    assert params == SamplingParams()
    assert (params.stop, params.stop_token_ids, params.logit_bias, params.top_k, params.seed) == ([], [], {}, 0, None)


def test_the_limits_are_allowed() -> None:
    SamplingParams(seed=2**63 - 1, top_p=1e-30, min_p=1.0, n=128, temperature=100, max_tokens=1, logprobs=20)
    SamplingParams(seed=-(2**63), min_tokens=5, max_tokens=5, presence_penalty=-2.0, frequency_penalty=2)
    SamplingParams(max_tokens=None, min_tokens=10**6, logit_bias={0: -100, 1: 100.0}, stop_token_ids=(1, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("n", 0, "from 1 to 128"),
        ("n", True, "an integer"),
        ("temperature", -0.1, "0 .greedy. to 100"),
        ("temperature", float("nan"), "a finite number"),
        ("temperature", "1", "a finite number"),
        ("top_p", 0.0, "greater than 0"),
        ("top_k", -2, "0 or -1"),
        ("top_k", 2**63, "0 or -1"),
        ("top_k", 1.5, "an integer"),
        ("min_p", 1.1, "0 to 1"),
        ("seed", 2**63, "a 64-bit integer"),
        ("seed", 0.5, "an integer"),
        ("presence_penalty", 2.1, "-2 to 2"),
        ("frequency_penalty", -2.1, "-2 to 2"),
        ("repetition_penalty", 0.0, "0.01 to 100"),
        ("repetition_penalty", 5e-324, "0.01 to 100"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", 17, "0 to max_tokens"),
        ("logprobs", 21, "0 to 20"),
        ("stop", ["a", ""], "a non-empty string"),
        ("stop", 5, "a non-empty string"),
        ("stop_token_ids", [-1], "a list of token ids"),
        ("stop_token_ids", 3, "a list of token ids"),
        ("stop_token_ids", {3: 1}, "a list of token ids"),
        ("logit_bias", {"a": 1.0}, "a map of token ids"),
        ("logit_bias", {1: 101.0}, "a map of token ids"),
        ("logit_bias", {1: float("nan")}, "a map of token ids"),
        ("logit_bias", [1], "a map of token ids"),
    ],
)
def test_other_values_are_refused_by_name(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(RequestError, match=f"^{field} must be {allowed}") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="stop strings are found in text"):
        SamplingParams(stop="a", detokenize=False)


def test_token_ids_are_checked_against_the_vocabulary() -> None:
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]).check_vocabulary(10)
    for params in (SamplingParams(logit_bias={10: 1.0}), SamplingParams(stop_token_ids=[1, 10])):
        with pytest.raises(RequestError, match="token id 10 is not in the vocabulary of 10 tokens"):
            params.check_vocabulary(10)
