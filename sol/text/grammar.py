"""Grammars compiled against a tokenizer, by llguidance.

The server compiles a request's grammar to refuse what cannot be compiled, the engine to compute by it. Both keep what
they compiled. Everything here may be called from any thread, and the compiling itself holds no lock of the
interpreter's: a schema that takes long delays nobody but who sent it.

Grammars come from strangers. What one may take is bounded: its text, the symbols it becomes, the work of a step
(llguidance's limits), the processor's time and the stack for compiling it, and what is kept.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from sol.errors import RequestError
from sol.grammar import Grammar
from sol.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

__all__ = ["Grammar", "GrammarCompiler"]

MAX_COMPILED: Final = 256
"""How many a compiler keeps: tens of KB each, seldom more …"""
MAX_KEPT_SECONDS: Final = 10.0
"""… and how much work is in them: what took a second to compile can have tens of MB."""
MAX_SECONDS: Final = 1.0
"""Of a thread's processor time that compiling may take. Whatever needs more, needs too much in each step as well."""
MAX_GBNF_BYTES: Final = 16 * 1024
"""The converter is plain Python, and takes a time that grows with the square of the number of rules."""

WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,20}"
"""Between the parts of JSON. Without a limit a weak model writes blanks for ever, which every schema allows."""
_JSON: Final[JsonCompileOptions] = {
    "whitespace_pattern": WHITESPACE,
    # A schema can set these by itself; what it then says it asks for would not be what it gets.
    "lenient": False,
    "coerce_one_of": False,
}
_IRREVOCABLE: Final = re.compile(r"^[ \t]*[?!]*\w+[ \t]*\[[^\n]*?\b(max_tokens|stop)[ \t]*=", re.MULTILINE)
_MULTIPLE: Final = re.compile(r'"multipleOf"\s*:\s*([0-9]{1,400}(?:\.[0-9]{1,400})?(?:[eE][+-]?[0-9]{1,9})?)')
_MAX_MULTIPLE: Final = 50_000
"""What finds multiples has a state for each remainder, and llguidance makes all of them before any limit counts: a
number of seven digits takes seconds, one of nine the machine's memory. Two numbers come to their least common multiple,
whole or not."""
_NUM_THREADS: Final = 2
"""Of a compiler: one that takes long does not hold up all others."""
_MAX_GRAMMAR_SIZE: Final = 100_000
"""Symbols of a compiled grammar; llguidance's own limit, 500,000, takes seconds to reach."""
_MAX_LEXER_STATES: Final = 20_000
"""1 or 2 KB each, of a request that generates; usual are some hundreds."""
_STACK_BYTES: Final = 256 * 2**20
"""The compiler recurses along chains of references. Chains as long as a text allows take 24 to 64 MB; a usual stack of
8 MB would overflow, which ends the process. It is address space until it is used."""


class GrammarCompiler:
    """Compiles against one vocabulary.

    `vocab_size` is the model's: tokens that only the embedding has are never allowed. `load` gives the tokenizer and
    the ids that may end a text once it is complete; it is called, and the vocabulary prepared (0.1 to 0.5 s), when the
    first grammar comes.

    What it raises is a `RequestError` whose message is the reason alone: whoever knows the field puts it in front.
    """

    def __init__(self, load: Callable[[], tuple[Tokenizer, Sequence[int]]], *, vocab_size: int) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._preparing = threading.Lock()
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._under_way: dict[Grammar, Future[None]] = {}
        self._lock = threading.Lock()
        """Of those two"""
        self._threads: ThreadPoolExecutor | None = None

    def is_compiled(self, grammar: Grammar) -> bool:
        """Whether `compile` takes no time."""
        with self._lock:
            return grammar in self._compiled

    @property
    def num_waiting(self) -> int:
        """Grammars that are being compiled, or are to be."""
        return len(self._under_way)

    def submit(self, grammar: Grammar) -> Future[None]:
        """Compile in a thread of the compiler's own. The future is shared by all who want the same: do not cancel
        it."""
        with self._lock:
            future = self._under_way.get(grammar)
            if future is not None:
                return future
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammars")
            previous = threading.stack_size(_STACK_BYTES)
            try:
                future = self._under_way[grammar] = self._threads.submit(self._find, grammar)
            finally:
                threading.stack_size(previous)
        future.add_done_callback(lambda _: self._under_way.pop(grammar, None))
        return future

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher at its beginning that belongs to whoever asks."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found.matcher.deep_copy()
        self.submit(grammar).result()
        return self.compile(grammar)

    def close(self) -> None:
        """Let go of what waits to be compiled; nobody may ask for anything after that."""
        with self._lock:
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)

    def _find(self, grammar: Grammar) -> None:
        if self.is_compiled(grammar):
            return
        made = self._make(grammar)
        with self._lock:
            kept = self._compiled
            kept[grammar] = made
            while len(kept) > 1 and (
                len(kept) > MAX_COMPILED or sum(one.seconds for one in kept.values()) > MAX_KEPT_SECONDS
            ):
                kept.popitem(last=False)

    def _make(self, grammar: Grammar) -> _Compiled:
        vocabulary = self._prepared()
        from llguidance import LLMatcher, LLParserLimits

        began = time.thread_time()
        _check_multiples(grammar)
        try:
            source = _source(grammar)
        except Exception as error:  # the converter of GBNF raises what it likes
            raise _refused(grammar, str(error)) from None
        limits = LLParserLimits(
            max_grammar_size=_MAX_GRAMMAR_SIZE, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
        )
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one takes longest, and copies have what it found out
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        seconds = time.thread_time() - began
        if seconds > MAX_SECONDS:
            raise _refused(grammar, f"it takes more than {MAX_SECONDS:g} s to compile; make it simpler")
        return _Compiled(matcher, seconds)

    def _prepared(self) -> LLTokenizer:
        with self._preparing:
            if self._vocabulary is None:
                try:
                    from llguidance import LLTokenizer
                except ImportError:
                    raise RequestError(
                        "structured output needs the package llguidance: pip install 'sol-inference[serve]'",
                        param="grammar",
                    ) from None
                tokenizer, end_ids = self._load()
                if not end_ids:
                    raise RequestError(
                        "structured output is not supported by this model, which has no token that ends a text",
                        param="grammar",
                    )
                adapter: Any = _Vocabulary(tokenizer, self._vocab_size, end_ids[0])
                self._vocabulary = LLTokenizer(adapter, n_vocab=self._vocab_size, eos_token=list(end_ids))
            return self._vocabulary


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: LLMatcher
    """At its beginning; only copies of it go on."""
    seconds: float
    """Of processor time"""


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


def _check_multiples(grammar: Grammar) -> None:
    """Of JSON Schemas, and of those inside other grammars, where letters may be written as escapes."""
    text = grammar.text
    if grammar.kind != "json_schema":
        text = re.sub(r"\\u00([0-9a-fA-F]{2})", lambda found: chr(int(found[1], 16)), text)
    common = 1
    for written in set(_MULTIPLE.findall(text)):
        number = Decimal(written).normalize()
        _, digits, exponent = number.as_tuple()
        assert isinstance(exponent, int)
        whole = int("".join(map(str, digits))) * 10 ** min(max(exponent, 0), 9)
        common = math.lcm(common, whole or 1)
        if common > _MAX_MULTIPLE:
            raise _refused(
                grammar,
                f"its multipleOf ({written:.40}) is too large, alone or with others: {_MAX_MULTIPLE} is the most",
            )


def _source(grammar: Grammar) -> str:
    """In llguidance's own format."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text))
            return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
        case "lark":
            return LLMatcher.grammar_from_lark(_revocable(grammar.text))
        case "ebnf":
            return LLMatcher.grammar_from_lark(_revocable(any_to_lark(_short(grammar.text))))


def _short(text: str) -> str:
    """Without blank lines, over each of which the converter copies the rest. Raises `ValueError` for GBNF that is too
    long for it."""
    text = "\n".join(line for line in re.split(r"\r\n|\r|\n", text) if line.strip())
    if "::=" in text and len(text) > MAX_GBNF_BYTES:
        raise ValueError(f"GBNF may have {MAX_GBNF_BYTES} characters, not {len(text)}; write it as Lark")
    return text


def _revocable(lark: str) -> str:
    """The grammar itself. Raises `ValueError` for attributes of rules with which a matcher cannot take tokens back, as
    it has to at every draft that is not right."""
    found = _IRREVOCABLE.search(lark)
    if found is not None:
        raise ValueError(f"rules with the attribute {found[1]}= are not supported; use suffix= or a bounded repetition")
    return lark


def _refused(grammar: Grammar, reason: str) -> RequestError:
    what = {"json_schema": "JSON Schema", "regex": "regular expression"}.get(grammar.kind, "grammar")
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    # Of several lines the first say where, with a picture of it, and one that begins so says what.
    said = next((line for line in lines if line.startswith("error: ")), " ".join(lines) or "it is not valid")
    return RequestError(f"this {what} is not supported: {said.removeprefix('error: ')[:500]}", param="grammar")
