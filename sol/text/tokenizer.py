"""Text to token ids and back, with Hugging Face's meaning: special tokens written out in a text are recognised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import tokenizers

from sol.errors import RequestError, TokenizerError
from sol.models.config import load_model_config
from sol.models.fields import read_json_object
from sol.models.gguf import GGUFFile
from sol.models.source import ModelFiles
from sol.text.gguf_tokenizer import build_gguf_tokenizer
from sol.text.special_tokens import named_special_tokens
from sol.text.token_bytes import TokenBytes

_LONG_TEXT: Final = 1024
"""Characters. Encoding more takes long enough to matter to other threads."""


class Tokenizer:
    """A model's tokenizer. Safe to share between threads.

    `backend` does the encoding and is changed: it becomes part of this object. `special_tokens` maps names
    (`bos_token`, `eos_token` …) to tokens; those that a language model does not use need not be in the vocabulary.
    `eos_token_ids` are the ids that end a generation, by default the one of `eos_token`.

    Decoding is defined on bytes: the bytes of the tokens are joined and read as UTF-8, with U+FFFD in the place of
    each longest invalid part. For valid UTF-8 that is what `tokenizers` and llama.cpp give; for invalid bytes it has
    the property that streaming needs, a text that never changes when tokens are appended, apart from a last
    character that is still incomplete. Hugging Face's `clean_up_tokenization_spaces` is not applied: it alters what
    the model wrote.

    Raises `TokenizerError` when BOS or EOS is not in the vocabulary, or the decoder is not supported.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ) -> None:
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        named: dict[str, int] = {}
        for name, text in (special_tokens or {}).items():
            token_id = self._id_of(name, text)
            if token_id is not None:
                named[name] = token_id
        # A vocabulary may hold them as ordinary tokens; their names make them special, as in Hugging Face.
        backend.add_special_tokens(
            [tokenizers.AddedToken(backend.id_to_token(i), normalized=False, special=True) for i in named.values()]
        )
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special) | frozenset(named.values())
        """Ids of control tokens: what `skip_special_tokens` leaves out."""
        self.bos_token_id = named.get("bos_token")
        if eos_token_ids is None:
            eos_token_ids = [named["eos_token"]] if "eos_token" in named else []
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        """One more than the highest id. A model's embedding may have more rows, never fewer."""
        self._bytes = TokenBytes(backend, {i: token.content for i, token in added.items()})

    @classmethod
    def from_files(cls, files: ModelFiles) -> Tokenizer:
        """The tokenizer in a GGUF file's metadata, or in tokenizer.json and the files beside it.

        Raises `TokenizerError` when there is none or it is of a kind that Sol does not know.
        """
        if files.gguf is not None:
            parts = build_gguf_tokenizer(GGUFFile(files.gguf).metadata, str(files.gguf))
            return cls(parts.backend, special_tokens=parts.special_tokens, eos_token_ids=parts.eos_token_ids)
        if files.tokenizer_json is None:
            raise TokenizerError(
                f"{files.root} has no tokenizer.json; with transformers installed, "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one from the older formats",
                param="model",
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(files.tokenizer_json))
        except Exception as error:  # the library raises plain Exception for whatever it cannot read
            raise TokenizerError(f"{files.tokenizer_json} cannot be read: {error}", param="model") from error
        return cls(backend, special_tokens=named_special_tokens(files), eos_token_ids=_generation_eos(files, backend))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. `add_special_tokens` adds what the model's post-processor adds, a BOS for instance;
        leave it out for text that a chat template rendered, which has them already.

        Raises `RequestError` for text that cannot be written as UTF-8 (half a surrogate pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt: character {error.start} is {text[error.start]!r}, half of a surrogate pair; "
                "send whole characters",
                param="prompt",
            ) from None
        if len(text) < _LONG_TEXT:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:  # the call for batches releases the interpreter's lock, so that a server's other threads go on
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Ids that are not in the vocabulary stand for nothing."""
        if skip_special_tokens:
            token_ids = [i for i in token_ids if i not in self.special_ids]
        return self._bytes.join(token_ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text that has begun: perhaps no whole UTF-8 character, and with the space that
        SentencePiece models drop at the beginning of a text. Special tokens give their name's bytes."""
        return self._bytes.later(token_id)

    def first_token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token that begins a text."""
        return self._bytes.first(token_id)

    def begins_text(self, token_id: int) -> bool:
        """Whether a text has begun with this token: true for all that stand for anything."""
        return self._bytes.begins(token_id)

    def id_to_token(self, token_id: int) -> str:
        """The token as the vocabulary writes it (`Ġthe`); empty when there is no such token."""
        return self._backend.id_to_token(token_id) or "" if 0 <= token_id < self.vocab_size else ""

    def _id_of(self, name: str, text: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(text)
        if token_id is None and name in ("bos_token", "eos_token"):
            raise TokenizerError(
                f"{name} is {text!r}, which is not in the vocabulary of {self._backend.get_vocab_size()} tokens: "
                "correct tokenizer_config.json",
                param="model",
            )
        return token_id


def _generation_eos(files: ModelFiles, backend: tokenizers.Tokenizer) -> list[int] | None:
    """End tokens from generation_config.json (Llama 3 lists several there)."""
    if files.generation_config is None:
        return None
    value: Any = read_json_object(files.generation_config).get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or token_id < 0 or backend.id_to_token(token_id) is None:
            raise TokenizerError(
                f"{files.generation_config}: eos_token_id must be ids in the vocabulary, not {value!r}", param="model"
            )
    return list(ids)


def end_token_ids(files: ModelFiles, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids that end a generation: those that the model's own files name, and the tokenizer's.

    Both are needed. Llama 3 lists several in generation_config.json; a chat model may end its turns with a token of
    the tokenizer's that no other file names.
    """
    of_tokenizer = () if tokenizer is None else tokenizer.eos_token_ids
    return tuple(dict.fromkeys(load_model_config(files).eos_token_ids + of_tokenizer))
