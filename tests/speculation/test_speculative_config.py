"""What users may ask, and what they hear of what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from sol.config import EngineConfig
from sol.errors import ConfigError
from sol.speculation.config import OFF, SpeculativeConfig, speculative_config


def settle(options: Any = None, **given: Any) -> SpeculativeConfig:
    return speculative_config(
        speculation=given.get("speculation", "auto"),
        model=given.get("model"),
        num_speculative_tokens=given.get("num_speculative_tokens"),
        options=options,
    )


def test_text_is_looked_up_unless_something_else_is_asked() -> None:
    assert settle() == SpeculativeConfig(drafters=("suffix",))
    assert settle(speculation="off") is OFF
    assert EngineConfig().speculative().drafters == ("suffix",)


def test_a_model_drafts_where_no_text_is_found() -> None:
    old = settle(model="org/small", num_speculative_tokens=5)
    assert (old.drafters, old.model, old.num_speculative_tokens) == (("suffix", "draft_model"), "org/small", 5)
    assert settle({"model": "org/small"}).drafters == ("suffix", "draft_model")
    assert settle({"method": "draft_model", "model": "org/small"}).drafters == ("draft_model",)


@pytest.mark.parametrize(
    ("method", "drafters"),
    [("ngram", ("ngram",)), ("early_exit+ngram", ("ngram", "early_exit")), ("suffix+suffix", ("suffix",))],
)
def test_methods_and_combinations(method: str, drafters: tuple[str, ...]) -> None:
    assert settle({"method": method}).drafters == drafters


def test_keys_of_vllm() -> None:
    config = settle(
        {
            "method": "ngram",
            "prompt_lookup_max": 4,
            "num_speculative_tokens": 3,
            "draft_tensor_parallel_size": 1,
            "rejection_sample_method": "strict",
            "model": None,
        }
    )
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (4, 4)
    assert (config.num_speculative_tokens, config.verify_method) == (3, "rejection")
    assert settle('{"method": "suffix", "suffix_decoding_min_token_prob": 0}').suffix_decoding_min_token_prob == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{method: ngram}", "is not JSON"),
        ([1], "must be a JSON object"),
        ({"method": "eagle3"}, "'eagle3' is not supported yet"),
        ({"method": "guess"}, "must be ngram, suffix, draft_model, early_exit"),
        ({"method": 3}, "method must be a string"),
        ({"method": "draft_model"}, "no model is given"),
        ({"method": "ngram", "model": "x"}, "has no use for it"),
        ({"tokens": 3}, "has no key 'tokens'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be a whole number from 1 to 64"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens must be a whole number"),
        ({"suffix_decoding_max_spec_factor": -1}, "suffix_decoding_max_spec_factor must be a number from 0"),
        ({"prompt_lookup_min": 6, "prompt_lookup_max": 3}, "prompt_lookup_min must be at most prompt_lookup_max"),
        ({"verify_method": "typical"}, "verify_method must be coupled, rejection, block, not 'typical'"),
        ({"draft_sample_method": "independent"}, "coupled verification accepts only the token the target samples"),
        ({"draft_sample_method": "coupled", "verify_method": "block"}, "only if drafts do not share its noise"),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size must be 1"),
        ({"controller": "always"}, "controller must be goodput, fixed"),
    ],
)
def test_what_cannot_be_is_named(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        settle(options)
    assert caught.value.param == "speculative_config"


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_drafts_do_not_share_the_noise_of_a_target_that_is_kept_in_law_only(method: str) -> None:
    assert settle({"method": "early_exit", "verify_method": method}).draft_sample_method == "independent"
    assert settle({"method": "early_exit"}).draft_sample_method == "coupled"
    greedy = settle({"method": "early_exit", "verify_method": method, "draft_sample_method": "greedy"})
    assert greedy.draft_sample_method == "greedy"


def test_two_places_that_disagree() -> None:
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is 3, but the option beside it says 4"):
        settle({"num_speculative_tokens": 3}, num_speculative_tokens=4)
    with pytest.raises(ConfigError, match="speculation is off, but speculative_model is given"):
        settle(model="x", speculation="off")
