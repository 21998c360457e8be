"""Header lines, and what may stand in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""RFC 9110, section 5.6.2."""
_NOT_IN_VALUES: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
FRAMING: Final = frozenset(
    {"connection", "content-length", "expect", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Those that say how a message is sent, which is the connection's business."""


def check_header(name: str, value: str) -> None:
    """Raises ValueError, which does not show the value: it may be a secret."""
    if not _TOKEN.fullmatch(name):
        raise ValueError(f"{name!r:.80} is no name of a header")
    if name.lower() in FRAMING:
        raise ValueError(f"the header {name} says how a request is sent, which the gateway does; remove it")
    if _NOT_IN_VALUES.search(value) or value != value.strip():
        raise ValueError(f"the value of the header {name} has a control character, or spaces around it; remove them")


def header_lines(headers: Mapping[str, str]) -> bytes:
    """Each with its line's end. Raises ValueError for what would be no header, or would be another one."""
    lines = []
    for name, value in headers.items():
        check_header(name, value)
        lines.append(f"{name}: ".encode("ascii") + _encoded(value) + b"\r\n")
    return b"".join(lines)


def _encoded(value: str) -> bytes:
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        return value.encode()
