"""The sections of gateway.yaml that are about limits, prices and the database."""

from __future__ import annotations

from typing import Any

import pytest

from sol.errors import ConfigError
from sol.gateway.config import make_config

BASE: dict[str, Any] = {
    "models": [{"name": "llama", "engines": ["one"]}],
    "engines": [{"name": "one", "url": "http://127.0.0.1:1"}],
}
KEY = {"key_sha256": "0" * 64}


def test_a_whole_example_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", "secret")
    read = make_config(
        {
            **BASE,
            "keys": [{**KEY, "limits": "small"}],
            "limits": {
                "policies": {"small": {"requests_per_minute": 60, "models": {"llama": {"tokens_per_minute": 1000}}}},
                "default_policy": "small",
                "tenants": {"acme": {"tokens_per_minute": 100_000}},
                "default_tenant": {"requests_per_minute": 10},
                "models": {"llama": {"requests_per_minute": 1000}},
                "output_estimate": {"quantile": 0.9},
                "redis": {"url": "redis://:${REDIS_PASSWORD}@redis:6379/0", "fail": "closed"},
            },
            "prices": {"llama": {"input": "0.1", "output": 0.4}},
            "database": {"url": "postgres://sol:pw@db/sol"},
        }
    )
    assert read.limits.redis is not None
    assert read.limits.redis.url == "redis://:secret@redis:6379/0"
    assert read.database is not None
    assert read.database.url == "postgresql+asyncpg://sol:pw@db/sol"
    assert "secret" not in repr(read)
    assert "pw" not in repr(read)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"limits": {"policies": {"small": {}}}}, "needs requests_per_minute or tokens_per_minute"),
        ({"limits": {"policies": {"small": {"requests_per_minute": -1}}}}, "limits.policies.small.requests_per_minute"),
        ({"limits": {"policies": {"small": {"request_per_minute": 1}}}}, "there is no such option"),
        ({"limits": {"default_policy": "large"}}, "default_policy: there is no policy 'large'"),
        ({"keys": [{**KEY, "limits": "large"}]}, "there is no policy 'large'"),
        ({"limits": {"models": {"lama": {"requests_per_minute": 1}}}}, "there is no model 'lama'"),
        (
            {"limits": {"policies": {"small": {"models": {"lama": {"requests_per_minute": 1}}}}}},
            "there is no model 'lama'",
        ),
        ({"limits": {"redis": {"url": "http://redis"}}}, "must be like redis://"),
        ({"limits": {"redis": {"url": "redis://redis", "fail": "maybe"}}}, "limits.redis.fail"),
        ({"limits": {"output_estimate": {"quantile": 1}}}, "limits.output_estimate.quantile"),
        ({"prices": {"llama": {"input": 1}}}, "prices.llama.output is missing|prices.llama.output: is missing"),
        ({"prices": {"llama": {"input": -1, "output": 1}}}, "prices.llama.input"),
        ({"database": {"url": "mysql://db"}}, "must be sqlite:///"),
        ({"database": {"url": "sqlite:///:memory:"}}, "must name a file"),
        ({"database": {"url": "sqlite://"}}, "must name a file"),
    ],
)
def test_what_cannot_work_is_refused_by_name(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config({**BASE, **section})
