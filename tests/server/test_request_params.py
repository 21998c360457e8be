from __future__ import annotations

from typing import Any

import pytest

from sol.engine.types import SpeculationParams
from sol.errors import RequestError
from sol.sampling_params import SamplingParams
from sol.seeds import SeedSource
from sol.server.params import chat_params, completion_params
from sol.server.protocol import ChatBody, CompletionBody
from sol.server.speculation import speculation_params


def chat(**fields: Any) -> SamplingParams:
    return chat_params(ChatBody.model_validate({"messages": [{}], **fields}))


def completion(**fields: Any) -> SamplingParams:
    return completion_params(CompletionBody.model_validate({"prompt": "Hi", **fields}))


def test_defaults_are_openais() -> None:
    assert chat() == SamplingParams(max_tokens=None)
    assert completion() == SamplingParams(max_tokens=16)


def test_every_parameter_arrives() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "n": 3, "stop": ["a"], "stop_token_ids": [5],
        "seed": 7, "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
        "ignore_eos": True, "min_tokens": 2, "max_tokens": 9, "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }  # fmt: skip
    expected = SamplingParams(**fields, logit_bias={5: 1.0}, logprobs=4)
    assert completion(**fields, logit_bias={"5": 1}, logprobs=4) == expected
    assert chat(**fields, logit_bias={"5": 1}, logprobs=True, top_logprobs=4) == expected


def test_names_of_the_token_limit() -> None:
    assert chat(max_completion_tokens=5).max_tokens == 5
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    with pytest.raises(RequestError, match="old name") as error:
        chat(max_tokens=5, max_completion_tokens=6)
    assert error.value.param == "max_tokens"
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(RequestError, match=f"^{name} must be at least 1, not 0") as error:
            chat(**{name: 0})
        assert error.value.param == name


def test_logprobs_of_a_chat() -> None:
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).logprobs == 20
    assert chat(logprobs=False).logprobs is None
    assert chat(top_logprobs=0).logprobs is None
    for fields in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}):
        with pytest.raises(RequestError) as error:
            chat(**fields)
        assert error.value.param == "top_logprobs"


def test_logprobs_of_a_completion() -> None:
    assert completion(logprobs=0).logprobs == 0
    with pytest.raises(RequestError) as error:
        completion(logprobs=21)
    assert error.value.param == "logprobs"


def test_logprobs_of_the_prompt() -> None:
    assert completion(logprobs=2, echo=True).prompt_logprobs == 2
    assert completion(logprobs=2, echo=True, prompt_logprobs=5).prompt_logprobs == 5
    assert completion(logprobs=2).prompt_logprobs is None
    assert completion(echo=True).prompt_logprobs is None
    assert chat(prompt_logprobs=3).prompt_logprobs == 3
    for fields in ({"prompt_logprobs": 21}, {"prompt_logprobs": 1, "stream": True}):
        with pytest.raises(RequestError) as error:
            chat(**fields)
        assert error.value.param == "prompt_logprobs"


def test_no_tokens_beside_an_echo() -> None:
    assert completion(max_tokens=0, echo=True).max_tokens == 1
    with pytest.raises(RequestError) as error:
        completion(max_tokens=0)
    assert error.value.param == "max_tokens"


def test_best_of() -> None:
    assert completion(best_of=1).n == 1
    for stream in (False, True):
        plain = completion(best_of=2, n=2, stream=stream)
        assert (plain.n, plain.logprobs) == (2, None)
    assert (completion(best_of=3, n=2).n, completion(best_of=3, n=2).logprobs) == (3, 0)
    assert (completion(best_of=3, logprobs=4).n, completion(best_of=3, logprobs=4).logprobs) == (3, 4)
    refused: list[dict[str, Any]] = [
        {"best_of": 1, "n": 2}, {"best_of": 0}, {"best_of": 129}, {"best_of": 2, "stream": True},
    ]  # fmt: skip
    for fields in refused:
        with pytest.raises(RequestError) as error:
            completion(**fields)
        assert error.value.param == "best_of"


def test_stream_options_need_a_stream() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).n == 1
    with pytest.raises(RequestError) as error:
        chat(stream_options={"include_usage": True})
    assert error.value.param == "stream_options"


def test_a_wish_of_speculation() -> None:
    def wish(**fields: Any) -> SpeculationParams | None:
        body = CompletionBody.model_validate({"prompt": "Hi", **fields})
        return speculation_params(body, ["ngram", "suffix"])

    assert wish() is None
    assert wish(speculation=None, stream_options={"include_usage": True}) is None
    assert wish(speculation={}) == SpeculationParams()
    assert wish(speculation={"enabled": None, "drafter": None}) == SpeculationParams()
    assert wish(speculation={"enabled": False, "tenant": "t"}) == SpeculationParams(enabled=False, tenant="t")
    asked = wish(speculation={"drafter": "ngram"}, stream_options={"include_speculation": True})
    assert asked == SpeculationParams(drafter="ngram", include_origins=True)
    assert wish(stream_options={"include_speculation": True}) == SpeculationParams(include_origins=True)
    with pytest.raises(RequestError, match="ngram, suffix") as error:
        wish(speculation={"drafter": "draft_model"})
    assert error.value.param == "speculation.drafter"


@pytest.mark.parametrize("name", ["temperature", "top_p", "n", "min_p", "presence_penalty", "repetition_penalty"])
def test_a_value_out_of_range_names_its_field(name: str) -> None:
    with pytest.raises(RequestError) as error:
        chat(**{name: 1000})
    assert error.value.param == name


def test_seeds_are_a_counter_and_the_servers_seed() -> None:
    first, again, other = SeedSource(0), SeedSource(0), SeedSource(-1)
    seeds = [first.next() for _ in range(1000)]
    assert seeds == [again.next() for _ in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert not set(seeds) & {other.next() for _ in range(1000)}
