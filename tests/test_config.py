"""Options that cannot work are refused by name, whatever their type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sol.config import EngineConfig
from sol.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", "", "model must be a string: a path, a hub id or pypi:NAME, not ''"),
        ("model", Path("/models/a"), "model must be a string"),
        ("dtype", "int8", "dtype must be one of auto, float32, float16, bfloat16, not 'int8'"),
        ("max_model_len", 0, "max_model_len must be a whole number of at least 1, not 0"),
        ("max_num_seqs", 1.5, "max_num_seqs must be a whole number"),
        ("kv_cache_memory_bytes", True, "kv_cache_memory_bytes must be a whole number"),
        ("gpu_memory_utilization", 0.0, "greater than 0 and at most 1, not 0.0"),
        ("gpu_memory_utilization", float("nan"), "greater than 0 and at most 1"),
        ("gpu_memory_utilization", "0.5", "greater than 0 and at most 1, not '0.5'"),
        ("gpu_memory_utilization", True, "greater than 0 and at most 1"),
        ("block_size", 257, "block_size must be 1 to 256 tokens"),
        ("max_model_len", 2**63, "max_model_len must be less than 2"),
        ("seed", "1", "seed must be a whole number, not '1'"),
        ("seed", 2**63, "seed must be a 64-bit integer, not 9223372036854775808"),
        ("skip_tokenizer_init", 1, "skip_tokenizer_init must be true or false, not 1"),
        ("speculation", "ngram", "speculation must be one of auto, off, not 'ngram'"),
        ("speculative_config", '{"method": "ngram"}', "speculative_config must be a dictionary"),
        ("speculative_config", {"method": "eagle3"}, "'eagle3' is not supported yet"),
        ("offline", 1, "offline must be true or false, not 1"),
        ("revision", " ", "revision must be a branch, a tag or a commit, not ' '"),
        ("hf_token", "hf_a b", "hf_token must be printable ASCII without spaces, and not empty$"),
        ("enable_prefix_caching", "no", "enable_prefix_caching must be true or false, not 'no'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig(**{field: value})
    assert caught.value.param == field
