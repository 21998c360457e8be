"""Names, places and what else has no form of its own, found by Microsoft Presidio and a spaCy model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sol.errors import ConfigError
from sol.gateway.filters.config import PiiRule, PresidioOptions
from sol.gateway.filters.detectors import BudgetError, Detection
from sol.gateway.filters.rules import Rule
from sol.gateway.filters.sentences import sentences


class PresidioDetector:
    """A `Detector`. Raises `ConfigError` if Presidio or the spaCy model is not installed: nothing is downloaded."""

    def __init__(self, rule: Rule, analyzer: Any = None) -> None:
        """`analyzer`: a `presidio_analyzer.AnalyzerEngine` with recognizers of one's own; None: made from options."""
        assert isinstance(rule.config, PiiRule)
        assert rule.config.presidio is not None
        self.rule = rule
        self._options = rule.config.presidio
        self.budget = self._options.budget
        place = f"filters.{rule.config.name}.presidio"
        self._analyzer = analyzer if analyzer is not None else _load(self._options, place)
        known = set(self._analyzer.get_supported_entities(self._options.language))
        for entity in self._options.entities:
            if entity not in known:
                raise ConfigError(
                    f"{place}.entities: Presidio knows no {entity!r} in {self._options.language!r}; it knows "
                    f"{', '.join(sorted(known))}",
                    param=f"{place}.entities",
                )

    def detect(self, texts: Sequence[str], deadline: float) -> list[Detection]:
        found = []
        for number, text in enumerate(texts):
            # Sentence by sentence, so that the clock is looked at in between.
            for start, end in sentences(text):
                if time.monotonic() >= deadline:
                    raise BudgetError
                results = self._analyzer.analyze(
                    text[start:end],
                    language=self._options.language,
                    entities=list(self._options.entities),
                    score_threshold=self._options.threshold,
                )
                found += [
                    Detection(number, start + result.start, start + result.end, result.entity_type.lower())
                    for result in results
                ]
        return sorted(found)


def _load(options: PresidioOptions, place: str) -> Any:
    try:
        import spacy.util
        from presidio_analyzer import AnalyzerEngine
        from presidio_analyzer.nlp_engine import NlpEngineProvider
    except ImportError:
        message = f"{place}: needs Presidio: pip install 'sol-inference[pii]'"
        raise ConfigError(message, param=place) from None
    if not spacy.util.is_package(options.spacy_model):  # Presidio would download it in the middle of a start
        raise ConfigError(
            f"{place}.spacy_model: {options.spacy_model} is not installed: python -m spacy download "
            f"{options.spacy_model}",
            param=f"{place}.spacy_model",
        )
    models = [{"lang_code": options.language, "model_name": options.spacy_model}]
    engine = NlpEngineProvider(nlp_configuration={"nlp_engine_name": "spacy", "models": models}).create_engine()
    return AnalyzerEngine(nlp_engine=engine, supported_languages=[options.language])
