"""The bytes that each token stands for.

A `tokenizers` decoder turns a whole list of tokens into text. Streaming, stop strings and logprobs need less and more:
the bytes of one token, without looking at the others. For the decoders of today's language models that is possible
with one distinction, whether the token begins the text or follows another one (SentencePiece models drop the space
that their first token carries). A decoder that needs more than that, the last token for instance, is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any, Final

import tokenizers

from sol.errors import TokenizerError

_ToBytes = Callable[[str], bytes]

_SUPPORTED: Final = (
    "ByteLevel, Metaspace, WordPiece without cleanup, none, or a Sequence of Replace, ByteFallback, Fuse and Strip "
    "of one character on the left"
)
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary, as GPT-2 defined it.

    Printable bytes of Latin-1 stand for themselves; the other 68 are numbered from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update((chr(0x100 + number), byte) for number, byte in enumerate(others))
    return alphabet


class TokenBytes:
    """Looks up `first(id)`, the token's bytes at the beginning of a text, and `later(id)`, its bytes elsewhere.

    Bytes need not be whole UTF-8 characters. An id that the vocabulary does not have stands for nothing: checkpoints
    round their embedding up, and a model with random weights samples the surplus.

    Raises `TokenizerError` when the tokenizer's decoder is not one of those supported.
    """

    def __init__(self, backend: tokenizers.Tokenizer, added_tokens: dict[int, str]) -> None:
        state = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._first_of, self._later_of = _compile(state)
        self._token = backend.id_to_token
        # A byte-level vocabulary writes bytes as characters, but the tokens added to it are plain text.
        self._plain = {i: text.encode() for i, text in added_tokens.items()} if _is_byte_level(state) else {}
        self._first: dict[int, bytes] = {}
        self._later: dict[int, bytes] = {}

    def first(self, token_id: int) -> bytes:
        found = self._first.get(token_id)
        if found is None:
            found = self._first[token_id] = self._look_up(token_id, self._first_of)
        return found

    def later(self, token_id: int) -> bytes:
        found = self._later.get(token_id)
        if found is None:
            found = self._later[token_id] = self._look_up(token_id, self._later_of)
        return found

    def begins(self, token_id: int) -> bool:
        """Whether a token that follows this one is a later one. Not if this one stands for nothing."""
        return bool(self.later(token_id) or self.first(token_id))

    def join(self, token_ids: Collection[int]) -> bytes:
        """The bytes of a text that consists of these tokens."""
        pieces: list[bytes] = []
        started = False
        for token_id in token_ids:
            pieces.append(self.later(token_id) if started else self.first(token_id))
            started = started or self.begins(token_id)
        return b"".join(pieces)

    def _look_up(self, token_id: int, to_bytes: _ToBytes) -> bytes:
        plain = self._plain.get(token_id)
        if plain is not None:
            return plain
        token = self._token(token_id) if 0 <= token_id < 2**32 else None
        return b"" if token is None else to_bytes(token)


def _is_byte_level(state: dict[str, Any] | None) -> bool:
    while state is not None and state["type"] == "Sequence" and len(state["decoders"]) == 1:
        state = state["decoders"][0]
    return state is not None and state["type"] == "ByteLevel"


def _compile(state: dict[str, Any] | None) -> tuple[_ToBytes, _ToBytes]:
    """What a decoder does to the first token of a text, and to a later one."""
    match state:
        case None:
            return str.encode, lambda token: b" " + token.encode()
        case {"type": "ByteLevel"}:
            return _byte_level, _byte_level
        case {"type": "Metaspace", "replacement": replacement, "prepend_scheme": scheme}:
            dropped = " " if scheme == "never" else ""
            return (
                lambda token: token.replace(replacement, dropped).encode(),
                lambda token: token.replace(replacement, " ").encode(),
            )
        case {"type": "WordPiece", "prefix": prefix, "cleanup": False}:
            return str.encode, lambda token: (
                token.removeprefix(prefix) if token.startswith(prefix) else " " + token
            ).encode()
        case {"type": "Sequence", "decoders": [only]}:
            return _compile(only)
        case {"type": "Sequence", "decoders": steps}:
            return _compile_sequence(state, steps)
        case _:
            raise _unsupported(state)


def _compile_sequence(state: dict[str, Any], steps: list[dict[str, Any]]) -> tuple[_ToBytes, _ToBytes]:
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    strip = b""
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not byte_fallback and not fused:
                replacements.append((old, new))
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "stop": 0, "start": 0 | 1 as start, "content": content} if fused and not strip:
                strip = content.encode() if start else b""
            case _:
                raise _unsupported(state)

    def later(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        return bytes.fromhex(byte[1]) if byte else token.encode()

    return lambda token: later(token).removeprefix(strip), later


_BYTES: Final = byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:  # not of the alphabet, so not written in it
        return token.encode()


def _unsupported(state: Any) -> TokenizerError:
    found = json.dumps(state, ensure_ascii=False)
    return TokenizerError(f"tokenizer.json: decoder {found} is not supported; supported: {_SUPPORTED}", param="model")
