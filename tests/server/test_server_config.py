from __future__ import annotations

from typing import Any

import pytest

from sol.config import EngineConfig
from sol.errors import ConfigError
from sol.server.config import ServerConfig


def test_the_model_is_called_what_it_is_unless_told_otherwise() -> None:
    engine = EngineConfig(model="org/name")
    assert ServerConfig(engine=engine).model_names == ("org/name",)
    assert ServerConfig(engine=engine, served_model_names=("a", "b")).model_names == ("a", "b")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"port": 65536}, "port"),
        ({"port": -1}, "port"),
        ({"host": ""}, "host"),
        ({"served_model_names": ("a", "")}, "served_model_name"),
        ({"api_keys": ("",)}, "api_key"),
        ({"api_keys": ("a b",)}, "api_key"),
        ({"api_keys": ("ключ",)}, "api_key"),
        ({"max_body_bytes": 10}, "max_body_bytes"),
        ({"stall_timeout": 0}, "stall_timeout"),
        ({"shutdown_timeout": -1}, "shutdown_timeout"),
        ({"drain_timeout": -1}, "drain_timeout"),
        ({"drain_timeout": float("nan")}, "drain_timeout"),
        ({"max_queue_len": 0}, "max_queue_len"),
        ({"restart_engine": -1}, "restart_engine"),
        ({"allow_credentials": True, "allowed_origins": ("*",)}, "allow_credentials"),
        ({"engine": EngineConfig(skip_tokenizer_init=True)}, "skip_tokenizer_init"),
    ],
)
def test_values_that_cannot_work(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServerConfig(**fields)
    assert error.value.param == param
    assert param in error.value.message


@pytest.mark.parametrize("value", [0, -1, 1e7, float("nan"), True, "10"])
def test_ages_that_are_none(value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(priority_aging_seconds=value)
    assert error.value.param == "priority_aging_seconds"
