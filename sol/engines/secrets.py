"""Command lines as they may be shown: logs and error messages are read by more people than keys are for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

HIDDEN = "***"

_NAME = r"(?:keys?|token|secrets?|passwords?)"
"""Not "tokens": flags that end so say how many."""
_FLAG = re.compile(rf"--?(?:\w+[-_])*{_NAME}", re.IGNORECASE | re.ASCII)
_VARIABLE = re.compile(rf"(?:\w+_)?{_NAME}", re.IGNORECASE | re.ASCII)


def without_secrets(words: Iterable[str]) -> list[str]:
    """The words with `***` for the values of flags such as `--api-key`, `--hf-token=…`, and of variables such as
    `HF_TOKEN=…`, which a container or `env` is given."""
    shown: list[str] = []
    hiding = False
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("-"):
            hiding = _FLAG.fullmatch(flag) is not None
            shown.append(f"{flag}={HIDDEN if hiding else _assignment(value)}" if equals else word)
        else:
            shown.append(HIDDEN if hiding else _assignment(word))
    return shown


def _assignment(word: str) -> str:
    """A word that may be `NAME=value`."""
    name, equals, _ = word.partition("=")
    return f"{name}={HIDDEN}" if equals and _VARIABLE.fullmatch(name) else word


def command_text(words: Iterable[str], env: Mapping[str, str]) -> str:
    """A command as one would type it, its variables before it, without secrets."""
    assigned = [f"{name}={HIDDEN if _VARIABLE.fullmatch(name) else shlex.quote(value)}" for name, value in env.items()]
    words = [word if word.endswith(HIDDEN) else shlex.quote(word) for word in without_secrets(words)]
    return " ".join([*assigned, *words])
