"""What endpoints send, in all the ways in which they do."""

from __future__ import annotations

import asyncio
import json

import pytest
from bench_server import FINISH, event, text_event, usage

from sol.bench.records import RequestRecord
from sol.bench.stream import ResponseSink

DONE = b"data: [DONE]\n\n"
SSE = {"content-type": "text/event-stream; charset=utf-8"}


async def take(
    *reads: bytes, status: int = 200, headers: dict[str, str] | None = None, stream: bool = True, end: bool = True
) -> RequestRecord:
    """The record of a response that arrives in these reads, at 101, 102, … of a clock that began at 100."""
    record = RequestRecord(0, "", 0, 0.0)
    done = asyncio.get_running_loop().create_future()
    sink = ResponseSink(record, done, 100.0, stream=stream, keep_text=True)
    sink.on_head(status, SSE if headers is None else headers)
    for i, read in enumerate(reads):
        sink.on_body(read, 101.0 + i)
    if end:
        sink.on_end(101.0 + len(reads))
        assert done.done()
    return record


async def test_a_stream_of_tokens() -> None:
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    record = await take(role, text_event("Hel"), text_event("lo"), FINISH, usage(7, 2), DONE)
    assert record.ok
    assert list(record.times) == [2.0, 3.0]
    assert list(record.characters) == [3, 2]
    assert (record.text, record.finish_reason) == ("Hello", "stop")
    assert (record.prompt_tokens, record.completion_tokens) == (7, 2)
    assert record.end == 7.0


async def test_events_may_be_split_anywhere() -> None:
    stream = text_event("Ä") + text_event("ber") + FINISH + usage(3, 2) + DONE
    for cut in range(1, len(stream)):
        record = await take(stream[:cut], stream[cut:])
        assert (record.error, record.text, record.completion_tokens) == (None, "Äber", 2), cut
        assert record.num_chunks == 2


async def test_other_ends_of_lines_comments_and_names_of_events() -> None:
    crlf = (text_event("a") + text_event("b") + FINISH + DONE).replace(b"\n", b"\r\n")
    record = await take(b": keep-alive\n\nevent: message\n" + crlf)
    assert record.ok
    assert record.text == "ab"
    # Both came in one read, so at one time; they are two chunks all the same.
    assert (list(record.times), record.num_chunks) == ([1.0], 2)


async def test_sols_segments_count_tokens_but_not_the_prompts() -> None:
    def segments(*parts: tuple[int, str]) -> dict[str, object]:
        return {"speculation": {"segments": [{"text": "x", "origin": o, "tokens": n} for n, o in parts]}}

    record = await take(
        text_event("p", **segments((9, "prompt"))),
        text_event("abc", **segments((2, "ngram"), (1, "target"))),
        event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop", **segments((1, "target"))}]),
        DONE,
    )
    assert list(record.counts) == [0, 3, 1]


async def test_continuous_usage_tells_what_each_chunk_added() -> None:
    def counted(text: str, total: int) -> bytes:
        choice = {"index": 0, "delta": {"content": text}}
        return event(choices=[choice], usage={"prompt_tokens": 5, "completion_tokens": total})

    record = await take(counted("a", 1), counted("bcd", 4), FINISH, usage(5, 4), DONE)
    assert list(record.counts) == [1, 3]


async def test_token_ids_count() -> None:
    record = await take(text_event("a", token_ids=[5]), text_event("bc", token_ids=[6, 7]), FINISH, DONE)
    assert list(record.counts) == [1, 2]


async def test_reasoning_is_output_but_no_content() -> None:
    def delta(**fields: object) -> bytes:
        return event(choices=[{"index": 0, "delta": fields}])

    record = await take(delta(reasoning_content="hm"), delta(reasoning="so"), delta(content="42"), FINISH, DONE)
    assert list(record.times) == [1.0, 2.0, 3.0]
    assert record.first_content == 3.0
    assert record.text == "42"


async def test_calls_of_tools_are_output() -> None:
    calls = [{"index": 0, "function": {"name": "f", "arguments": "{"}}]
    record = await take(event(choices=[{"index": 0, "delta": {"tool_calls": calls}}]), FINISH, DONE)
    assert record.ok
    assert record.num_chunks == 1


async def test_completions_have_a_text() -> None:
    record = await take(event(choices=[{"index": 0, "text": "ab", "finish_reason": "length"}]), DONE)
    assert (record.text, record.finish_reason) == ("ab", "length")


async def test_a_whole_response() -> None:
    used = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    body = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}], "usage": used}
    content = json.dumps(body).encode()
    record = await take(content[:9], content[9:], headers={"content-type": "application/json"}, stream=False)
    assert record.ok
    assert not record.streamed
    assert (record.text, record.completion_tokens, record.cached_tokens) == ("hi", 2, 1)
    # An endpoint that answers a wish for a stream as a whole has no times of tokens, either.
    assert not (await take(content, headers={"content-type": "application/json"})).streamed


@pytest.mark.parametrize(
    ("reads", "kind", "says"),
    [
        ((text_event("a"),), "truncated", "without a finish reason"),
        ((text_event("a"), b"data: {oops}\n\n", DONE), "malformed", "no chunk of a completion"),
        ((b'data: {"choices": "none"}\n\n',), "malformed", "no chunk of a completion"),
        ((text_event("a"), event(error={"message": "out of memory"})), "stream_error", "out of memory"),
        ((event(object="error", message="too long", code=400),), "stream_error", "too long"),
        ((FINISH, DONE), "empty", "no output"),
    ],
)
async def test_streams_that_fail(reads: tuple[bytes, ...], kind: str, says: str) -> None:
    record = await take(*reads)
    assert record.error == kind
    assert record.message is not None
    assert says in record.message


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"error": {"message": "slow down", "type": "rate_limit"}}', "slow down"),
        (b'{"detail": "Not Found"}', '{"detail":"Not Found"}'),
        (b"<html>bad gateway</html>", "<html>bad gateway</html>"),
        (b"\xff\xfe", "\ufffd"),
    ],
)
async def test_refusals_have_their_status_and_their_words(body: bytes, says: str) -> None:
    record = await take(body, status=429, headers={})
    assert (record.error, record.status) == ("http_429", 429)
    assert record.message is not None
    assert says in record.message


async def test_no_completion_is_malformed() -> None:
    for body in (b"{}", b"[1]", b"hello", b'{"choices": []}'):
        assert (await take(body, headers={}, stream=False)).error == "malformed"
