"""Builds a tokenizer from a GGUF file's `tokenizer.ggml.*` metadata.

GGUF keeps a vocabulary and says by name how text is cut before it is encoded: `tokenizer.ggml.model` is the family,
`tokenizer.ggml.pre` the pre-tokenizer of a byte-level one. A name that is not known here is an error. Guessing would
give ids that look right and are not, and a model that is quietly worse than its authors' (llama.cpp's `default`
is such a guess: it names no model's pre-tokenizer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from sol.errors import TokenizerError
from sol.models.fields import Fields

_KEY: Final = "tokenizer.ggml."
_META: Final = "\u2581"  # SentencePiece's visible space


class TokenType(IntEnum):
    """Kinds of tokens in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """What `sol.text.tokenizer.Tokenizer` is made from."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How the models behind one `tokenizer.ggml.pre` cut text, as their own tokenizer.json states it."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    """The model's tokenizer normalises to NFC. llama.cpp does not; for text in NFC, nearly all there is, they agree."""
    ignore_merges: bool = False
    """A piece that is a token is that token, whatever the merges say."""
    adds_bos: bool = False
    """Unless the file says otherwise."""


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# The end that the newer patterns share: punctuation with its line ends, line ends, spaces.
_TAIL: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_LLAMA3: Final = _PreTokenizer(
    _split(rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"),
    ignore_merges=True,
    adds_bos=True,
)
_QWEN2: Final = _PreTokenizer(
    _split(rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"), nfc=True
)
_TEKKEN: Final = _PreTokenizer(
    _split(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
    ),
    ignore_merges=True,
    adds_bos=True,
)

PRE_TOKENIZERS: Final[dict[str, _PreTokenizer]] = {
    "gpt-2": _PreTokenizer(_gpt2),
    "smollm": _PreTokenizer(_single_digits),
    "starcoder": _PreTokenizer(_single_digits),
    "refact": _PreTokenizer(_single_digits),
    "command-r": _PreTokenizer(_single_digits, nfc=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "tekken": _TEKKEN,
}
"""By the value of `tokenizer.ggml.pre`, for the family `gpt2`."""


def build_gguf_tokenizer(metadata: Mapping[str, Any], origin: str) -> GGUFTokenizer:
    """The tokenizer that `metadata` describes. `origin` is the file's name, for errors.

    Raises `TokenizerError` for a family or pre-tokenizer that is not known and for metadata that contradicts itself.
    """
    vocabulary = _Vocabulary(metadata, origin)
    family = metadata.get(_KEY + "model")
    match family:
        case "gpt2":
            backend, adds_bos = _byte_level(vocabulary)
        case "llama":
            backend, adds_bos = _sentencepiece(vocabulary), True
        case None:
            raise vocabulary.error("there is no tokenizer in it (tokenizer.ggml.model is missing)")
        case _:
            raise vocabulary.error(f"tokenizer.ggml.model {family!r} is not supported; supported: gpt2, llama")
    for kind in (TokenType.CONTROL, TokenType.UNKNOWN):
        backend.add_special_tokens(vocabulary.added(kind, special=True))
    backend.add_tokens(vocabulary.added(TokenType.USER_DEFINED, special=False))
    _add_post_processor(backend, vocabulary, adds_bos)
    return GGUFTokenizer(backend, vocabulary.special_tokens(), vocabulary.eos_token_ids())


def gguf_special_tokens(metadata: Mapping[str, Any], origin: str) -> dict[str, str]:
    """By name (`bos_token` …), the text of the special tokens that the metadata names.

    Raises `TokenizerError` for metadata that contradicts itself.
    """
    return _Vocabulary(metadata, origin).special_tokens()


class _Vocabulary:
    """The part of the metadata that both families share, checked."""

    def __init__(self, metadata: Mapping[str, Any], origin: str) -> None:
        self.metadata = metadata
        self.origin = origin
        self.fields = Fields(metadata, origin)
        self.tokens = self.array("tokens", str)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            repeated = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise self.error(f"tokenizer.ggml.tokens holds {repeated!r} more than once")
        self.types = self.array("token_type", int, optional=True) or [int(TokenType.NORMAL)] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise self.error(f"{len(self.tokens)} tokens have {len(self.types)} entries in tokenizer.ggml.token_type")

    def error(self, message: str) -> TokenizerError:
        return TokenizerError(f"{self.origin}: {message}", param="model")

    def array(self, name: str, of: type, *, optional: bool = False) -> list[Any]:
        values = self.metadata.get(_KEY + name)
        if values is None and optional:
            return []
        if not isinstance(values, list) or not all(type(value) is of for value in values):
            found = "missing" if values is None else f"a {type(values).__name__}"
            raise self.error(f"tokenizer.ggml.{name} must be an array of {of.__name__} values; it is {found}")
        return values

    def token_id(self, name: str) -> int | None:
        """The token that `tokenizer.ggml.<name>_token_id` says."""
        ids = self.fields.token_ids(f"{_KEY}{name}_token_id", len(self.tokens))
        return ids[0] if ids else None

    def flag(self, name: str, default: bool) -> bool:
        return self.fields.boolean(_KEY + name, default)

    def added(self, kind: TokenType, *, special: bool) -> list[tokenizers.AddedToken]:
        return [
            tokenizers.AddedToken(token, special=special, normalized=False)
            for token, of in zip(self.tokens, self.types, strict=True)
            if of == kind and token
        ]

    def special_tokens(self) -> dict[str, str]:
        ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown"}
        found = {name: self.token_id(key) for name, key in ids.items()}
        return {name: self.tokens[token_id] for name, token_id in found.items() if token_id is not None}

    def eos_token_ids(self) -> tuple[int, ...]:
        """End of sequence, of turn and of message, as far as the file names them."""
        ids = (self.token_id(name) for name in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    name = vocabulary.metadata.get(_KEY + "pre")
    kind = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if kind is None:
        said = "missing" if name is None else f"{name!r}, which is not supported"
        raise vocabulary.error(
            f"tokenizer.ggml.pre is {said}; supported: {', '.join(sorted(PRE_TOKENIZERS))}. "
            "Convert the model again with a current converter, or serve its Hugging Face directory"
        )
    if vocabulary.flag("add_space_prefix", False):
        raise vocabulary.error("tokenizer.ggml.add_space_prefix is true, which the family gpt2 does not have")
    # A space can only be the separator: the byte-level alphabet has none.
    merges = [tuple(merge.split(" ")) for merge in vocabulary.array("merges", str)]
    if not all(len(merge) == 2 for merge in merges):
        odd = next(" ".join(merge) for merge in merges if len(merge) != 2)
        raise vocabulary.error(f"tokenizer.ggml.merges holds {odd!r}, which is not two tokens with a space between")
    backend = tokenizers.Tokenizer(_bpe(vocabulary, merges, ignore_merges=kind.ignore_merges))
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = kind.build()
    backend.decoder = decoders.ByteLevel()
    return backend, kind.adds_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    scores = vocabulary.array("scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise vocabulary.error(f"{len(vocabulary.tokens)} tokens have {len(scores)} entries in tokenizer.ggml.scores")
    if vocabulary.flag("remove_extra_whitespaces", False):
        raise vocabulary.error("tokenizer.ggml.remove_extra_whitespaces is true, which is not supported")
    unknown = vocabulary.token_id("unknown")
    if unknown is None:
        unknown = next((i for i, kind in enumerate(vocabulary.types) if kind == TokenType.UNKNOWN), None)
    model = _bpe(
        vocabulary,
        _merges_from_scores(vocabulary, scores),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
    )
    backend = tokenizers.Tokenizer(model)
    escape = normalizers.Replace(" ", _META)
    unescape = [decoders.Replace(_META, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_META), escape])
        backend.decoder = decoders.Sequence([*unescape, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = escape
        backend.decoder = decoders.Sequence(unescape)
    return backend


def _merges_from_scores(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores highest; written as a list of merges in that order.

    Every split of a piece into two tokens is a way to arrive at it. Of the ways to one piece, longer left parts come
    first: with equal scores SentencePiece takes the leftmost pair.
    """
    ids = vocabulary.ids
    ranked: list[tuple[float, int, int, str]] = []
    for index, (piece, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED):
            score = -scores[index]
            ranked.extend(
                (score, index, -cut, piece) for cut in range(1, len(piece)) if piece[:cut] in ids and piece[cut:] in ids
            )
    ranked.sort()
    return [(piece[:-cut], piece[-cut:]) for _, _, cut, piece in ranked]


def _bpe(vocabulary: _Vocabulary, merges: Any, **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.ids, merges=merges, **options)
    except Exception as error:  # the library raises plain Exception, for a merge of tokens that do not exist
        raise vocabulary.error(f"tokenizer.ggml.merges do not fit the vocabulary: {error}") from error


def _add_post_processor(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, adds_bos: bool) -> None:
    parts: list[str] = ["$A"]
    used: list[dict[str, Any]] = []
    for name, flag, position in (
        ("bos", vocabulary.flag("add_bos_token", adds_bos), 0),
        ("eos", vocabulary.flag("add_eos_token", False), 2),
    ):
        if not flag:
            continue
        token_id = vocabulary.token_id(name)
        if token_id is None:
            raise vocabulary.error(
                f"prompts must get a {name.upper()} token, but there is no tokenizer.ggml.{name}_token_id"
            )
        parts.insert(position, name)
        used.append({"id": name, "ids": [token_id], "tokens": [vocabulary.tokens[token_id]]})
    if vocabulary.flag("add_sep_token", False):
        raise vocabulary.error("tokenizer.ggml.add_sep_token is true, which is not supported")
    if used:
        backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=used)
