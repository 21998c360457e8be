"""The section `filters` of gateway.yaml: a list, each entry of one kind. docs/gateway.md shows one of each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from sol.gateway.filters.expressions import ExpressionError, bounded_prefixes, compile_expression, normalise_pattern
from sol.gateway.section import Section

Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")]
Role = Literal["system", "developer", "user", "assistant", "tool"]
Action = Literal["reject", "redact", "flag"]
Direction = Literal["input", "output", "both"]
OnError = Literal["reject", "pass"]
Entity = Literal["email", "phone", "card", "iban", "cn_id", "ip", "secret"]
Share = Annotated[float, Field(ge=0, le=1)]


class Scope(Section):
    """Which texts a rule looks at; None: all. `roles` are those of input; answers are the assistant's."""

    roles: frozenset[Role] | None = None
    classes: frozenset[str] | None = None
    models: frozenset[str] | None = None
    tenants: frozenset[str] | None = None


class RuleOptions(Section):
    """What all kinds share."""

    name: Name
    """In decisions, metrics and what a refused client reads."""
    action: Action = "reject"
    """reject refuses the request (of an answer: ends it); redact puts `replacement` in its place; flag only says so."""
    shadow: bool = False
    """Decide and count, but do nothing: how a rule is tried out."""
    scope: Scope = Field(default_factory=Scope)
    on_error: OnError = "reject"
    """What becomes of a text that could not be looked at, because the rule failed or ran out of time."""
    message: str | None = Field(default=None, max_length=500)
    """What a refused client reads; None: the rule's name and the field it objects to."""


class TextRule(RuleOptions):
    """A rule that looks at what texts say."""

    direction: Direction = "input"
    replacement: str = Field(default="[redacted]", max_length=200)
    token_ids: OnError = "reject"  # noqa: S105  (no password)
    """What becomes of a prompt sent as token ids, of which nobody here knows the text."""

    @field_validator("replacement")
    @classmethod
    def _fits_into_json(cls, value: str) -> str:
        # It may be put into the arguments of a tool call, which are JSON in a string.
        if any(character in '"\\' or ord(character) < 32 for character in value):
            raise ValueError('must not contain ", \\ or control characters: arguments of tool calls must remain JSON')
        return value


class SizeRule(RuleOptions):
    """Limits of one request. They are refused, not redacted: half a prompt is another question."""

    kind: Literal["size"]
    action: Literal["reject", "flag"] = "reject"
    max_bytes: Annotated[int, Field(ge=1)] | None = None
    """Of the body."""
    max_messages: Annotated[int, Field(ge=1)] | None = None
    max_input_tokens: Annotated[int, Field(ge=1)] | None = None
    """As estimated before an engine has counted them."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """Of what the client asks for, all its choices together; a request that asks for no number passes."""

    @model_validator(mode="after")
    def _limits_something(self) -> SizeRule:
        limits = (self.max_bytes, self.max_messages, self.max_input_tokens, self.max_output_tokens)
        if all(limit is None for limit in limits):
            raise ValueError("needs one of max_bytes, max_messages, max_input_tokens and max_output_tokens")
        return self


class WordsRule(TextRule):
    """A list of words or phrases, found whatever their case, width, or what invisible is put between their letters."""

    kind: Literal["words"]
    words: tuple[str, ...] = ()
    file: Path | None = None
    """One a line, UTF-8; empty lines and those that begin with # do not count."""
    whole_words: bool = True
    """Not within longer words; without meaning in scripts that do not separate words, such as Chinese."""

    @model_validator(mode="after")
    def _some_words(self) -> WordsRule:
        if not self.words and self.file is None:
            raise ValueError("needs words or a file of them")
        return self


class RegexRule(TextRule):
    """Expressions of RE2."""

    kind: Literal["regex"]
    patterns: tuple[str, ...] = Field(min_length=1)
    case_sensitive: bool = False

    @field_validator("patterns")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for index, pattern in enumerate(patterns):
            try:
                if compile_expression(normalise_pattern(pattern)).search("") is not None:
                    raise ExpressionError("it matches the empty text, so every text; something in it must be there")
            except ExpressionError as error:
                raise ValueError(f"patterns[{index}], {pattern!r}: {error}") from None
        return patterns

    @model_validator(mode="after")
    def _fit_into_streams(self) -> RegexRule:
        for index, pattern in enumerate(self.patterns if self.direction != "input" else ()):
            try:
                bounded_prefixes(normalise_pattern(pattern))
            except ExpressionError as error:
                raise ValueError(f"patterns[{index}], {pattern!r}: {error}") from None
        return self


class PresidioOptions(Section):
    """Microsoft Presidio with a spaCy model that is installed; none is downloaded."""

    entities: tuple[str, ...] = ("PERSON", "LOCATION")
    """By Presidio's names."""
    language: str = "en"
    spacy_model: str = "en_core_web_sm"
    threshold: Share = 0.5
    budget: Annotated[float, Field(gt=0, le=60)] = 1.0
    """Seconds; what is not looked at by then is `on_error`'s."""


class PiiRule(TextRule):
    """Personal data and secrets. `replacement` may contain {entity}."""

    kind: Literal["pii"]
    action: Action = "redact"
    entities: tuple[Entity, ...] = Field(default=get_args(Entity), min_length=1)
    """Found by their form and checksum."""
    replacement: str = Field(default="[{entity}]", max_length=200)
    presidio: PresidioOptions | None = None
    """Finds more, in input only: it takes milliseconds."""

    @model_validator(mode="after")
    def _presidio_reads_input(self) -> PiiRule:
        if self.presidio is not None and self.direction != "input":
            raise ValueError("presidio is for input only, it is too slow for streams: add a second rule for output")
        return self


class ClassifierOptions(Section):
    """A sequence classifier in ONNX form, with its tokenizer.json."""

    model: Path
    tokenizer: Path
    label: Annotated[int, Field(ge=0)] = 1
    """Which of the model's outputs is the attack; a model with one output is its logit."""
    max_tokens: Annotated[int, Field(ge=8, le=8192)] = 512
    """Longer sentences are looked at in windows."""
    batch: Annotated[int, Field(ge=1, le=256)] = 16
    """Sentences at once."""
    threads: Annotated[int, Field(ge=1, le=64)] = 1
    budget: Annotated[float, Field(gt=0, le=60)] = 0.2
    """Seconds a request may take; what is not looked at by then is `on_error`'s."""


class InjectionRule(TextRule):
    """Prompt injection, sentence by sentence: by a list of signs, or by a classifier."""

    kind: Literal["injection"]
    direction: Literal["input"] = "input"
    threshold: Share = 0.8
    scope: Scope = Field(default_factory=lambda: Scope(roles=frozenset(("user", "tool"))))
    classifier: ClassifierOptions | None = None
    """None: the list of signs."""


FilterConfig = Annotated[SizeRule | WordsRule | RegexRule | PiiRule | InjectionRule, Field(discriminator="kind")]


def _names_differ(rules: tuple[Any, ...]) -> tuple[Any, ...]:
    twice = [name for name, count in Counter(rule.name for rule in rules).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} is there twice; names must differ")
    return rules


Filters = Annotated[tuple[FilterConfig, ...], AfterValidator(_names_differ)]
"""For a field of the whole file's model."""
