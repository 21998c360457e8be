"""Filters whose library is not installed say what to install."""

from __future__ import annotations

import sys

import pytest

from sol.errors import ConfigError
from sol.gateway.filters.config import InjectionRule, PiiRule
from sol.gateway.filters.filters import Filters


def test_presidio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    with pytest.raises(ConfigError, match=r"sol-inference\[pii\]"):
        Filters([PiiRule(kind="pii", name="names", presidio={})])


def test_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"sol-inference\[guard\]"):
        Filters([InjectionRule(kind="injection", name="guard", classifier={"model": "m", "tokenizer": "t"})])
