"""The page at `/`: chat with the model, see where its tokens came from, race speculation against plain decoding.

One document with its style and scripts inlined, so that it asks for nothing else and works behind any path prefix. It
is the same for everybody and tells nothing of the server; what it shows it reads from the API, with the user's key.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

_STATIC: Final = Path(__file__).with_name("static")
_STYLE: Final = re.compile(r'<link rel="stylesheet" href="([a-z]+\.css)">')
_SCRIPT: Final = re.compile(r'<script src="([a-z]+\.js)"></script>')


def _inline(document: str, pattern: re.Pattern[str], tag: str) -> tuple[str, list[str]]:
    """The document with the files that it names in it, and the source expressions that a policy allows them by."""
    sources: list[str] = []

    def content(match: re.Match[str]) -> str:
        text = (_STATIC / match[1]).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        sources.append(f"'sha256-{digest}'")
        return f"<{tag}>{text}</{tag}>"

    return pattern.sub(content, document), sources


def _build() -> tuple[bytes, dict[str, str]]:
    document = (_STATIC / "page.html").read_text(encoding="utf-8")
    document, styles = _inline(document, _STYLE, "style")
    document, scripts = _inline(document, _SCRIPT, "script")
    body = document.encode()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(scripts)}",
            f"style-src {' '.join(styles)}",
            "img-src data:",  # its icon
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",  # no text becomes markup or code, not even by mistake
        )
    )
    return (
        body,
        {
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",  # kept, but asked about each time: a new version of the server is seen at once
            "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        },
    )


_BODY, _HEADERS = _build()


async def page(request: Request) -> Response:
    known = re.findall(r'\*|"[^"]*"', request.headers.get("if-none-match", ""))
    if "*" in known or _HEADERS["etag"] in known:
        kept = ("content-security-policy", "cache-control", "etag")
        return Response(status_code=304, headers={name: _HEADERS[name] for name in kept})
    return Response(_BODY, headers=_HEADERS)
