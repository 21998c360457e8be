"""What Sol reads that somebody else wrote, each as a function of bytes: it returns, or raises what is a fault of ours.

Errors that Sol raises on purpose are answers. Used by `server_fuzz.py`, and by the tests with fewer inputs of each.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fuzz_seeds import (
    ANSWERS,
    BODIES,
    GRAMMARS,
    MESSAGES,
    STREAMS,
    TEMPLATES,
    gguf_file,
)

from sol.bench.records import RequestRecord
from sol.bench.stream import ResponseSink
from sol.errors import ModelError, RequestError
from sol.gateway.relay.sse import EventScanner, usage_in
from sol.models import gguf_config
from sol.models.gguf import GGUFFile
from sol.server.params import chat_params, completion_params
from sol.server.parsing import parse
from sol.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from sol.server.responses_input import ResponsesBody, responses_params
from sol.server.responses_items import messages_of
from sol.text import template_sandbox
from sol.text.answer_parser import AnswerParser
from sol.text.answer_parts import Answer, Part
from sol.text.chat_template import ChatTemplate
from sol.text.gguf_tokenizer import build_gguf_tokenizer, gguf_special_tokens
from sol.text.grammar import Grammar, GrammarCompiler
from sol.text.messages import flatten_messages
from sol.text.reasoning import DeepSeekR1Parser, ReasoningParser
from sol.text.tokenizer import Tokenizer
from sol.text.tools import parsers

NAMES: Final = frozenset({"look_up", "f", "a.b-c"})


@dataclass(frozen=True)
class Target:
    run: Callable[[bytes], None]
    seeds: Sequence[bytes]


# Chat templates: the source, a zero byte, the messages as JSON.


def _template(data: bytes) -> None:
    source, _, rest = data.partition(b"\0")
    try:
        messages = json.loads(rest)
    except (ValueError, RecursionError):
        messages = json.loads(MESSAGES)
    try:
        template = ChatTemplate(source.decode("utf-8", "replace"), {"bos_token": "<s>", "eos_token": "</s>"})
        flat = flatten_messages(messages) if isinstance(messages, list) else []
        text = template.render(flat, tools=messages if isinstance(messages, list) else None)
    except (RequestError, ModelError):
        return
    except AttributeError:
        if all(isinstance(message, dict) for message in messages):
            raise
        return  # a body's messages are objects: pydantic has seen to that
    assert len(text) <= template_sandbox.MAX_CHARACTERS


# Tool calls and reasoning: the first byte chooses the parsers, the second how the text is cut.

_PARSERS: Final[Sequence[Callable[[], AnswerParser]]] = (
    lambda: AnswerParser(None, parsers.HermesParser(NAMES)),
    lambda: AnswerParser(None, parsers.Llama3JsonParser(NAMES)),
    lambda: AnswerParser(None, parsers.MistralParser(NAMES)),
    lambda: AnswerParser(None, parsers.ForcedCallsParser(NAMES)),
    lambda: AnswerParser(None, parsers.ForcedArgumentsParser("f")),
    lambda: AnswerParser(ReasoningParser(), parsers.HermesParser(NAMES)),
    lambda: AnswerParser(DeepSeekR1Parser(), parsers.MistralParser(NAMES), max_calls=1),
    lambda: AnswerParser(DeepSeekR1Parser(), None, show_reasoning=False),
)


def _answer(data: bytes) -> None:
    if len(data) < 2:
        return
    make = _PARSERS[data[0] % len(_PARSERS)]
    text = data[2:].decode("utf-8", "replace")
    whole = _read(make(), [text] if text else [])
    size = data[1] % 7 + 1
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    cut = _read(make(), pieces)
    assert whole == cut, (whole, cut)
    if data[0] % len(_PARSERS) == 0 and "<" not in text:
        assert whole.content == text


def _read(parser: AnswerParser, pieces: Sequence[str]) -> Answer:
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.feed(piece)
    return Answer.of([*parts, *parser.finish()])


# GGUF files.


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def _gguf(data: bytes) -> None:
    path = Path(_directory().name) / f"{os.getpid()}.gguf"
    path.unlink(missing_ok=True)  # and not written over: the last one may still be mapped
    path.write_bytes(data)
    try:
        file = GGUFFile(path)
    except ModelError:
        return
    for name in file.tensors:
        file.data(name)
    for read in (
        lambda: gguf_config.read(path),
        lambda: gguf_special_tokens(file.metadata, "the file"),
        lambda: build_gguf_tokenizer(file.metadata, "the file").backend.encode("a bad cab"),
    ):
        try:
            read()
        except ModelError:
            continue


# Grammars: the first byte chooses the kind.


@functools.cache
def _compiler() -> GrammarCompiler:
    """Of a vocabulary of 270 tokens: what a schema comes to is what is looked for, not how large a vocabulary is."""
    import tokenizers

    path = Path(_directory().name) / "vocabulary.gguf"
    path.write_bytes(gguf_file())
    built = build_gguf_tokenizer(GGUFFile(path).metadata, "the file")
    assert isinstance(built.backend, tokenizers.Tokenizer)
    tokenizer = Tokenizer(built.backend, special_tokens=built.special_tokens)
    return GrammarCompiler(lambda: (tokenizer, (2,)), vocab_size=270)


def _grammar(data: bytes) -> None:
    text = data[1:].decode("utf-8", "replace")
    try:
        match _kind(data, 5):
            case 0:
                grammar = Grammar.json_schema(text)
            case 1:
                grammar = Grammar.regex(text)
            case 2:
                try:
                    choices = json.loads(text)
                except (ValueError, RecursionError):
                    choices = text.split()
                grammar = Grammar.choice(choices)
            case 3:
                grammar = Grammar.lark(text)
            case _:
                grammar = Grammar.ebnf(text)
    except RequestError:
        return
    try:
        matcher = _compiler().compile(grammar)
    except RequestError as error:
        _check_message(error)
        return
    random_ = random.Random(len(data))
    for _ in range(8):
        mask = int.from_bytes(bytes(matcher.compute_bitmask()), "little")
        allowed = [token for token in range(270) if mask >> token & 1]
        if not allowed:
            break
        if not matcher.consume_token(random_.choice(allowed)):
            break


# Bodies of requests.


def _body(data: bytes) -> None:
    rest = data[1:]
    try:
        match _kind(data, 5):
            case 0:
                chat = parse(rest, ChatBody)
                chat_params(chat)
                flatten_messages(chat.messages)
            case 1:
                completion_params(parse(rest, CompletionBody))
            case 2:
                responses = parse(rest, ResponsesBody)
                responses_params(responses)
                flatten_messages(messages_of(responses.input))
            case 3:
                flatten_messages(parse(rest, TokenizeBody).messages or [])
            case _:
                parse(rest, DetokenizeBody)
    except RequestError as error:
        _check_message(error)


def _check_message(error: RequestError) -> None:
    """It can be sent, and is no echo of all that was sent."""
    error.message.encode()
    if len(error.message) > 3000:
        raise AssertionError(error.message)


def _kind(data: bytes, count: int) -> int:
    """What the first byte chooses: `0`, `1` and so on."""
    return (data[0] - ord("0")) % count if data else 0


# Streams of events, as the gateway and `sol bench` read them: the first byte says how they are cut.


def _stream(data: bytes) -> None:
    size = (data[0] if data else 0) + 1
    pieces = [data[i : i + size] for i in range(1, len(data), size)]
    for hides in (False, True):
        done = []
        for parts in ([data[1:]], pieces):
            scanner = EventScanner(hide_usage=hides, hide_running=hides)
            try:
                passed = b"".join(scanner.feed(part) for part in parts)
            except ValueError:  # an event that is too large
                done.append(None)
                continue
            done.append(scanner.done)
            scanner.find_usage()
            if not hides and b"[]" not in data:  # in whose events the usage is looked for
                assert data[1:].startswith(passed), passed
        # A server has one kind of line end; two in one answer may look like one event or two.
        assert done[0] == done[1] or b"\r\n" in data, done
    usage_in(data[1:])
    loop = _loop()
    for streams in (True, False):
        sink = ResponseSink(
            RequestRecord(index=0, key="", turn=0, intended=0.0),
            loop.create_future(),
            0.0,
            stream=streams,
            keep_text=True,
        )
        sink.on_head(200, {"content-type": "text/event-stream"} if streams else {})
        for part in pieces:
            sink.on_body(part, 1.0)
        sink.on_end(2.0)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


TARGETS: Final[dict[str, Target]] = {
    "templates": Target(_template, [template + b"\0" + MESSAGES for template in TEMPLATES]),
    "tool_calls": Target(_answer, [bytes([kind, 2]) + answer for kind in range(len(_PARSERS)) for answer in ANSWERS]),
    "gguf": Target(_gguf, [gguf_file(), gguf_file()[:1000]]),
    "grammars": Target(_grammar, GRAMMARS),
    "bodies": Target(_body, BODIES),
    "streams": Target(_stream, STREAMS),
}


def mutate(random_: random.Random, data: bytes, words: Sequence[bytes], others: Sequence[bytes]) -> bytes:
    """Some of: bytes changed, put in and left out, words of the format put in, a piece twice, the end of another."""
    spoilt = bytearray(data)
    for _ in range(random_.randint(1, 5)):
        at = random_.randrange(len(spoilt) + 1)
        match random_.randrange(7):
            case 0:
                spoilt[at : at + 1] = random_.randbytes(1)
            case 1:
                del spoilt[at : at + random_.randint(1, 12)]
            case 2 | 3:
                spoilt[at:at] = random_.choice(words)
            case 4:
                spoilt[at : at + random_.randint(1, 8)] = random_.choice(words)
            case 5:
                spoilt[at:at] = spoilt[at : at + random_.randint(1, 60)] * random_.choice((1, 1, 2, 100))
            case _:
                other = random_.choice(others)
                spoilt[at:] = other[random_.randrange(len(other) + 1) :]
    return bytes(spoilt)
