"""The simulator's own tokenizer: common English words, pairs of letters and digits, Chinese characters, and bytes.

It has no model file and is exact: every token is a string of bytes, and the tokens of a text joined are the text. Token
counts come out near those of real tokenizers (a common word with the space before it is one token, another word a
token for every two letters, a Chinese character one).
"""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections.abc import Sequence
from typing import Any, Final

_TEXT: Final = """
the of and to in is that for it as was with be by on not this are or his from at which but have an had they you
were their one all we can her has there been if more when will would who so no she other its may these them than
some him time into only do such my new about out also two any up first could our then most made over even must
like after before many where through back much good should well people down own just because each those how too
state years very here between both life under last being work long while might take against part place again off
house still always right world water found without great once end high number course less every better night
public thought though set small eyes head called did group form given point used line during large power ground
order system local second across early best plan change light open kind need seem turn hand side old feel later
name ask men case fact week company service question school member law car city community president team minute
idea body information parent face level office door health person art history party result morning reason
research moment air teacher force education foot boy age policy music market sense nation college interest
experience effect use class control care field development role effort rate heart show leader voice whole mind
price report decision son view relation town road arm difference value building action model season society tax
director position player record paper space table event matter center couple site project activity star answer
example letter river mountain garden window machine engine memory language sentence message signal network
server request token cache block queue batch step speed cost test measure design simple exact stable quick slow
clear deep wide narrow warm cold bright quiet busy empty full common rare modern ancient north south east west
summer winter spring autumn monday friday evening hour month make know think come look want give find tell
become leave keep begin help talk start run move live believe bring happen write provide sit stand lose pay meet
include continue learn lead understand watch follow stop create speak read allow add spend grow walk win offer
remember love consider appear buy wait serve send expect build stay fall cut reach remain suggest raise pass
sell require decide return explain hope develop carry break receive agree support hit produce eat cover catch
draw choose cause listen realize apply argue compare prove around however together perhaps almost already often
never sometimes usually rather quite enough today yesterday tomorrow soon now therefore instead especially
finally nearly simply certainly indeed likely
"""
WORDS: Final = tuple(_TEXT.split())
"""All different."""

END: Final = 256
_ROLES: Final = ("system", "user", "assistant", "tool")
_SPECIAL: Final = {END: "<|end|>", **{257 + i: f"<|{role}|>" for i, role in enumerate(_ROLES)}}
_CHINESE: Final = range(0x4E00, 0xA000)


def _pieces() -> list[bytes]:
    fixed = [bytes([value]) for value in range(256)] + [text.encode() for text in _SPECIAL.values()]
    tokens: list[bytes] = []
    for alphabet in (string.ascii_lowercase, string.digits):
        tokens += ["".join(pair).encode() for pair in itertools.product(alphabet, repeat=2)]
    for word in WORDS:
        tokens += [form.encode() for form in (f" {word}", word, f" {word.capitalize()}", word.capitalize())]
    # A pair of letters may be a word, and a word of one letter a byte: each has one id.
    return list(dict.fromkeys([*fixed, *tokens]))


_PIECES: Final = _pieces()
_FIRST_CHINESE: Final = len(_PIECES)
VOCAB_SIZE: Final = _FIRST_CHINESE + len(_CHINESE)

_IDS: Final = {piece: token_id for token_id, piece in enumerate(_PIECES) if token_id not in _SPECIAL}
_SPLIT: Final = re.compile(r" ?[A-Za-z]+|[0-9]+|.", re.DOTALL)
_LETTERS: Final = re.compile(r"[a-z]{2}|[0-9]{2}|.", re.DOTALL)


def word_id(form: str) -> int:
    """The token of one of `WORDS`, with or without a space before it or a capital."""
    return _IDS[form.encode()]


def encode(text: str) -> list[int]:
    """Token ids of a text. What looks like a special token is text like any other."""
    token_ids: list[int] = []
    for piece in _SPLIT.findall(text):
        token_ids += _encode_piece(piece)
    return token_ids


@functools.lru_cache(maxsize=65536)
def _encode_piece(piece: str) -> tuple[int, ...]:
    if len(piece) == 1 and ord(piece) in _CHINESE:
        return (_FIRST_CHINESE + ord(piece) - _CHINESE.start,)
    known = _IDS.get(_bytes(piece))
    if known is not None:
        return (known,)
    token_ids: list[int] = []
    for part in _LETTERS.findall(piece):
        known = _IDS.get(_bytes(part))
        token_ids += _bytes(part) if known is None else (known,)
    return tuple(token_ids)


def _bytes(text: str) -> bytes:
    # JSON can carry half of a surrogate pair, which UTF-8 cannot: it becomes what a decoder shows for nonsense.
    return text.encode("utf-8", "replace")


def token_bytes(token_id: int) -> bytes:
    if token_id >= _FIRST_CHINESE:
        return chr(_CHINESE.start + token_id - _FIRST_CHINESE).encode()
    return _PIECES[token_id]


def decode(token_ids: Sequence[int]) -> str:
    """The text of tokens, special ones written out; bytes that are no UTF-8 become U+FFFD."""
    return b"".join(map(token_bytes, token_ids)).decode("utf-8", "replace")


def encode_chat(messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> list[int]:
    """Token ids of a chat (`sol.text.messages.flatten_messages`): each message between its role and an end token."""
    token_ids: list[int] = []
    for message in messages:
        token_ids += [_role(message["role"]), *encode(message["content"]), END]
    if add_generation_prompt:
        token_ids.append(_role("assistant"))
    return token_ids


def _role(name: str) -> int:
    return 257 + _ROLES.index(name)
