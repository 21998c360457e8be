"""Grammars compiled against a tokenizer, by llguidance.

The server compiles a request's grammar to refuse what cannot be compiled, the engine to compute by it. Both keep what
they compiled. Everything here may be called from any thread, and the compiling itself holds no lock of the
interpreter's: a schema that takes long delays nobody but who sent it.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from sol.errors import RequestError
from sol.grammar import Grammar
from sol.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Grammar", "GrammarCompiler"]

logger = logging.getLogger(__name__)

MAX_COMPILED: Final = 256
"""How many a compiler keeps: tens of KB each, seldom more."""

_WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,20}"
"""Between the parts of JSON. Without a limit a weak model writes blanks for ever, which every schema allows."""
_MAX_GRAMMAR_SIZE: Final = 100_000
"""Symbols of a compiled grammar; llguidance's own limit, 500,000, takes seconds to reach."""


class GrammarCompiler:
    """Compiles against one vocabulary.

    `vocab_size` is the model's: tokens that only the embedding has are never allowed. `eos_token_ids` are those that
    may end a text once it is complete. The vocabulary is prepared when it is first needed (0.1 to 0.5 s).
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._preparing = threading.Lock()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: Grammar, *, param: str = "grammar") -> None:
        """Raise `RequestError` for what cannot be compiled; the message names the feature that is the reason."""
        self._find(grammar, param)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher at its beginning that belongs to whoever asks. Raises `RequestError`."""
        return self._find(grammar, "grammar").deep_copy()

    def is_compiled(self, grammar: Grammar) -> bool:
        """Whether `check` and `compile` take no time."""
        with self._lock:
            return grammar in self._compiled

    def _find(self, grammar: Grammar, param: str) -> LLMatcher:
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found
        made = self._make(grammar, param)
        with self._lock:
            self._compiled[grammar] = made
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return made

    def _make(self, grammar: Grammar, param: str) -> LLMatcher:
        vocabulary = self._prepared(param)
        from llguidance import LLMatcher, LLParserLimits

        try:
            source = _source(grammar)
        except Exception as error:  # the converter of GBNF raises what it likes
            raise _refused(grammar, str(error), param) from None
        limits = LLParserLimits(max_grammar_size=_MAX_GRAMMAR_SIZE, verbose_errors=False)
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one takes longest: copies have what it found out
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error(), param)
        return matcher

    def _prepared(self, param: str) -> LLTokenizer:
        with self._preparing:
            if self._vocabulary is None:
                try:
                    from llguidance import LLTokenizer
                except ImportError:
                    raise RequestError(
                        f"{param} needs the package llguidance: pip install 'sol-inference[serve]'", param=param
                    ) from None
                if not self._eos_token_ids:
                    raise RequestError(
                        f"{param} is not supported by this model, which has no token that ends a text: remove it",
                        param=param,
                    )
                adapter: Any = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids[0])
                self._vocabulary = LLTokenizer(adapter, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
            return self._vocabulary


class _Vocabulary:
    """A tokenizer as llguidance wants to see it."""

    is_tokenizer_wrapper: Final = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False)


def _source(grammar: Grammar) -> str:
    """In llguidance's own format."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": _WHITESPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text))
            return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case "ebnf":
            return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))


def _refused(grammar: Grammar, reason: str, param: str) -> RequestError:
    what = {"json_schema": "JSON Schema", "regex": "regular expression"}.get(grammar.kind, "grammar")
    reason = " ".join(reason.split())
    return RequestError(f"{param}: this {what} is not supported: {reason[:500]}", param=param)
