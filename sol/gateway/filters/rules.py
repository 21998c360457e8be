"""The rules of a configuration that look at texts, compiled: which look at a request, which at an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sol.errors import ConfigError
from sol.gateway.filters.config import (
    FilterConfig,
    InjectionRule,
    PiiRule,
    RegexRule,
    Scope,
    SizeRule,
    TextRule,
    WordsRule,
)
from sol.gateway.filters.expressions import ExpressionError
from sol.gateway.filters.injection import SIGNS, combined
from sol.gateway.filters.matcher import Expression, Match, Matcher, Search
from sol.gateway.filters.normalise import View
from sol.gateway.filters.pii import ENTITIES
from sol.gateway.filters.sentences import sentences

logger = logging.getLogger("sol.gateway.filters")

_WEIGHTS: Final = {sign.name: sign.weight for sign in SIGNS}


class Subject(NamedTuple):
    """Whose texts are looked at, for scopes."""

    model: str = ""
    class_name: str = ""
    tenant: str = ""


def applies(scope: Scope, subject: Subject) -> bool:
    return (
        (scope.models is None or subject.model in scope.models)
        and (scope.classes is None or subject.class_name in scope.classes)
        and (scope.tenants is None or subject.tenant in scope.tenants)
    )


@dataclass(frozen=True, slots=True)
class Rule:
    config: TextRule
    search: Search

    def replacement(self, label: str) -> str:
        if isinstance(self.config, PiiRule):
            return self.config.replacement.replace("{entity}", label)
        return self.config.replacement

    @property
    def withholds(self) -> bool:
        """Whether a text must not pass before the rule has seen it."""
        return not self.config.shadow and self.config.action != "flag"


@dataclass(frozen=True, slots=True)
class Hit:
    """`text`, which stands at `start` to `end` in a field, is what `rule` acts on."""

    rule: Rule
    label: str
    start: int
    end: int
    text: str = field(repr=False)


Failed = Callable[[Rule, Exception], None]


@dataclass(slots=True)
class RuleSet:
    """Some rules and the one matcher that serves them all."""

    rules: tuple[Rule, ...]
    matcher: Matcher
    injection: frozenset[int] = field(init=False)
    _all: frozenset[int] | None = field(init=False, default=None)
    """The numbers of all rules, where whose text it is makes no difference."""

    def __post_init__(self) -> None:
        self.injection = frozenset(
            number for number, rule in enumerate(self.rules) if isinstance(rule.config, InjectionRule)
        )
        scopes = [rule.config.scope for rule in self.rules]
        if all(scope.models is scope.classes is scope.tenants is None for scope in scopes):
            self._all = frozenset(range(len(self.rules)))

    def find(self, text: str, failed: Failed, numbers: frozenset[int], role: str | None = None) -> list[Hit]:
        """What the rules of these numbers act on in a whole text, by where it begins; `role`: whose text it is."""
        view = View(text)
        matches = self.matcher.find(view, failed=lambda number, error: self._failed(number, error, numbers, failed))
        if not matches:
            return []
        hits = []
        for match in matches:
            if match.rule in numbers and match.rule not in self.injection:
                rule = self.rules[match.rule]
                if role is None or rule.config.scope.roles is None or role in rule.config.scope.roles:
                    hits.append(Hit(rule, match.label, match.start, match.end, text[match.start : match.end]))
        for number in self.injection & numbers if self.injection else ():
            rule = self.rules[number]
            if role is None or rule.config.scope.roles is None or role in rule.config.scope.roles:
                hits += self._sentences(text, rule, [match for match in matches if match.rule == number])
                hits.sort(key=lambda hit: hit.start)
        return hits

    def _failed(self, number: int, error: Exception, numbers: frozenset[int], failed: Failed) -> None:
        if number in numbers:
            failed(self.rules[number], error)

    @staticmethod
    def _sentences(text: str, rule: Rule, matches: list[Match]) -> list[Hit]:
        """The sentences whose signs together say enough."""
        assert isinstance(rule.config, InjectionRule)
        hits: list[Hit] = []
        if not matches:
            return hits
        for start, end in sentences(text):
            signs = {match.label for match in matches if start <= match.start < end}
            if signs and combined([_WEIGHTS[sign] for sign in signs]) >= rule.config.threshold:
                hits.append(Hit(rule, "+".join(sorted(signs)), start, end, text[start:end]))
        return hits

    def numbers(self, subject: Subject) -> frozenset[int]:
        """Of the rules that look at this subject's texts."""
        if self._all is not None:
            return self._all
        return frozenset(n for n, rule in enumerate(self.rules) if applies(rule.config.scope, subject))


def compile_rules(configs: Sequence[FilterConfig], *, streaming: bool = False) -> RuleSet:
    """Raises `ConfigError` that names the rule."""
    rules = []
    for config in configs:
        assert not isinstance(config, SizeRule)
        rule = Rule(config, _search(config))
        try:
            # Alone first, so that what is wrong has a name; together, rules share one pass.
            Matcher([rule.search], streaming=streaming) if isinstance(config, (WordsRule, RegexRule)) else None
        except ExpressionError as error:
            raise ConfigError(f"filters: {config.name}: {error}", param=f"filters.{config.name}") from None
        rules.append(rule)
    try:
        return RuleSet(tuple(rules), Matcher([rule.search for rule in rules], streaming=streaming))
    except ExpressionError as error:
        raise ConfigError(f"filters: all rules together are too much: {error}", param="filters") from None


def _search(config: TextRule) -> Search:
    if isinstance(config, WordsRule):
        return Search(words=_words(config), whole_words=config.whole_words)
    if isinstance(config, RegexRule):
        return Search(
            tuple(
                Expression(pattern, f"patterns[{index}]", config.case_sensitive)
                for index, pattern in enumerate(config.patterns)
            )
        )
    if isinstance(config, PiiRule):
        return Search(
            tuple(
                Expression(entity.pattern, name, True, entity.validator)
                for name in config.entities
                for entity in ENTITIES[name]
            )
        )
    assert isinstance(config, InjectionRule)
    return Search(tuple(Expression(sign.pattern, sign.name) for sign in SIGNS))


def _words(config: WordsRule) -> tuple[str, ...]:
    words = list(config.words)
    if config.file is not None:
        try:
            lines = config.file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"filters: {config.name}: file: {config.file} cannot be read: {error}",
                param=f"filters.{config.name}.file",
            ) from None
        words += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not words:
            raise ConfigError(
                f"filters: {config.name}: file: {config.file} has no words; put one in a line",
                param=f"filters.{config.name}.file",
            )
    return tuple(words)
