"""Presidio with recognizers of our own and a blank spaCy pipeline: models are hundreds of megabytes."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest
from filter_calls import chat, make_call

from sol.errors import ConfigError
from sol.gateway.filters.config import PiiRule
from sol.gateway.filters.detectors import BudgetError
from sol.gateway.filters.filters import Filters
from sol.gateway.filters.matcher import Search
from sol.gateway.filters.presidio import PresidioDetector
from sol.gateway.filters.rules import Rule

presidio = pytest.importorskip("presidio_analyzer", reason="the extra pii is not installed")
spacy = pytest.importorskip("spacy", reason="the extra pii is not installed")


def make_rule(**options: Any) -> PiiRule:
    return PiiRule(kind="pii", name="names", presidio={"entities": ["PERSON"], "budget": 30, **options})


@pytest.fixture(scope="module")
def analyzer() -> Any:
    engine = importlib.import_module("presidio_analyzer.nlp_engine").SpacyNlpEngine(
        models=[{"lang_code": "en", "model_name": "blank"}]
    )
    engine.nlp = {"en": spacy.blank("en")}
    registry = presidio.RecognizerRegistry(supported_languages=["en"])
    registry.add_recognizer(presidio.PatternRecognizer("PERSON", deny_list=["Ada Lovelace", "Grace Hopper"]))
    return presidio.AnalyzerEngine(registry=registry, nlp_engine=engine, supported_languages=["en"])


async def test_names_are_redacted_beside_what_has_a_form(analyzer: Any) -> None:
    filters = Filters([make_rule()], lambda rule: PresidioDetector(rule, analyzer))
    call = make_call(chat("Hello. Ask Ada Lovelace, ada@example.com. Or Grace Hopper!"))
    await filters.check(call)
    assert call.json["messages"][0]["content"] == "Hello. Ask [person], [email]. Or [person]!"
    assert sorted(d.action for d in call.decisions) == ["redact"] * 3
    filters.close()


def test_the_clock_is_looked_at(analyzer: Any) -> None:
    detector = PresidioDetector(Rule(make_rule(), Search()), analyzer)
    with pytest.raises(BudgetError):
        detector.detect(["Ada Lovelace."], time.monotonic() - 1)


def test_what_presidio_does_not_know_is_a_configuration_error(analyzer: Any) -> None:
    with pytest.raises(ConfigError, match="knows no 'SHOE_SIZE'"):
        PresidioDetector(Rule(make_rule(entities=["SHOE_SIZE"]), Search()), analyzer)


def test_a_model_that_is_missing_is_not_downloaded() -> None:
    with pytest.raises(ConfigError, match="no_such_model is not installed"):
        Filters([make_rule(spacy_model="no_such_model")])
