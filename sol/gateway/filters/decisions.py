"""What rules found, in words without a word of the user's, and how often."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from sol.gateway.call import Call, Decision

STAGE: Final = "filter"
MAX_DECISIONS: Final = 64
"""That a call records; all are counted. A text of a million addresses must not fill the memory with findings."""


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    action: str
    """reject, redact or flag; pass where the rule failed and lets texts pass then."""
    shadow: bool
    label: str
    """Which of the rule's expressions, words or entities it was, or what went wrong."""
    where: str
    """The field, as in `messages[1].content`."""
    start: int = 0
    end: int = 0
    """In characters of the field's text; both 0 where it is about the whole field."""
    digest: str = ""

    def decision(self) -> Decision:
        place = f"{self.where} {self.start}..{self.end}" if self.end else self.where
        detail = " ".join(part for part in (place, self.label, self.digest and f"#{self.digest}") if part)
        return Decision(
            stage=STAGE, rule=self.rule, action=f"shadow_{self.action}" if self.shadow else self.action, detail=detail
        )


@dataclass(slots=True)
class Counts:
    """Since the start. Labels are names of the configuration, so there is a bounded number of them."""

    decisions: Counter[tuple[str, str, str, bool]] = field(default_factory=Counter)
    """By rule, direction (input or output), action, shadow."""
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By rule, and error or timeout."""

    def count(self, direction: str, finding: Finding) -> None:
        self.decisions[finding.rule, direction, finding.action, finding.shadow] += 1


class Digests:
    """Equal texts have equal digests, and nobody who reads a log can find the text by trying: they depend on a key that
    is drawn at each start."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of(self, text: str) -> str:
        return hashlib.blake2b(text.encode(errors="surrogatepass"), key=self._key, digest_size=6).hexdigest()


def record(call: Call, finding: Finding) -> None:
    if has_room(call):
        call.decisions.append(finding.decision())


def has_room(call: Call) -> bool:
    return sum(decision.stage == STAGE for decision in call.decisions) < MAX_DECISIONS
