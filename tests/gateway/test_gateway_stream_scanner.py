"""Whatever pieces a stream arrives in, whole events come out of it, and what they say is found."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sol.gateway.call import Usage
from sol.gateway.relay.sse import MAX_EVENT_BYTES, EventScanner, usage_in


def event(data: Any, end: str = "\n\n") -> bytes:
    return f"data: {json.dumps(data)}{end}".encode()


def chunk(text: str, **more: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": {"content": text}}], **more}


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
DONE = b"data: [DONE]\n\n"
# What an answer says must not be taken for what the stream is.
TRICKS = [
    'data: [DONE]\n\ndata: {"error"',
    '"choices":[]',
    'x\n\ndata: [DONE]\n\n"usage":{"prompt_tokens":9}}\n\n',
    "ü",
]


def feed(scanner: EventScanner, data: bytes, cuts: list[int]) -> tuple[bytes, list[bytes]]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    out = [scanner.feed(data[a:b]) for a, b in itertools.pairwise(places)]
    return b"".join(out) + scanner.finish(), [part for part in out if part]


@given(
    st.lists(st.sampled_from([*TRICKS, "a", "", " "]), max_size=6),
    st.lists(st.integers(0, 10_000), max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_any_cutting_gives_the_same_events_whole(texts: list[str], cuts: list[int], hide: bool, shown: bool) -> None:
    chunks = [event(chunk(text)) for text in texts]
    usage = event({"id": "x", "choices": [], "usage": USAGE})
    scanner = EventScanner(hide_usage=hide)
    out, parts = feed(scanner, b"".join(chunks) + (usage if shown else b"") + DONE, cuts)
    assert out == b"".join(chunks) + (usage if shown and not hide else b"") + DONE
    assert all(part.endswith(b"\n\n") for part in parts)
    assert (scanner.done, scanner.failed) == (True, False)
    expected = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1) if shown else None
    assert scanner.find_usage() == expected


@given(st.lists(st.integers(0, 10_000), max_size=8), st.booleans())
def test_how_far_a_choice_is_is_known_and_not_shown(cuts: list[int], asked_for_usage: bool) -> None:
    events = []
    for number, text in enumerate(TRICKS):
        usage = {"prompt_tokens": 3, "completion_tokens": number + 1, "total_tokens": number + 4}
        events.append(json.dumps(chunk(text, usage=usage), separators=(",", ":")))
    data = "".join(f"data: {each}\n\n" for each in events).encode()
    scanner = EventScanner(hide_usage=not asked_for_usage, hide_running=True)
    out, _ = feed(scanner, data, cuts)
    payloads = [json.loads(line.removeprefix("data: ")) for line in out.decode().split("\n\n") if line]
    more = {"usage": None} if asked_for_usage else {}
    assert payloads == [chunk(text, **more) for text in TRICKS]
    assert scanner.find_usage() == Usage(prompt_tokens=3, completion_tokens=len(TRICKS))
    assert not scanner.done


def test_the_usage_is_found_wherever_an_engine_puts_it() -> None:
    last = {**chunk(""), "usage": USAGE}  # as llama.cpp and TGI have it
    scanner = EventScanner(hide_usage=True)
    assert scanner.feed(event(chunk("a")) + event(last)) != b""
    assert scanner.feed(DONE) == DONE
    assert scanner.find_usage() is not None

    response = {"type": "response.completed", "response": {"usage": {"input_tokens": 5, "output_tokens": 7}}}
    scanner = EventScanner(hide_usage=False)
    scanner.feed(b"event: response.completed\n" + event(response))
    assert scanner.find_usage() == Usage(prompt_tokens=5, completion_tokens=7)


def test_lines_may_end_as_in_http() -> None:
    scanner = EventScanner(hide_usage=True)
    data = event(chunk("a"), "\r\n\r\n") + event({"choices": [], "usage": USAGE}, "\r\n\r\n") + b"data: [DONE]\r\n\r\n"
    out, _ = feed(scanner, data, [5, 40, 41, 42, 43, 90])
    assert out == event(chunk("a"), "\r\n\r\n") + b"data: [DONE]\r\n\r\n"
    assert scanner.done
    assert scanner.find_usage() is not None


def test_an_end_without_a_blank_line_is_an_end_and_half_an_event_is_none() -> None:
    scanner = EventScanner(hide_usage=True)
    assert scanner.feed(event(chunk("a")) + b"data: [DONE]\n") == event(chunk("a"))
    assert scanner.finish() == DONE
    assert scanner.done
    scanner = EventScanner(hide_usage=True)
    assert scanner.feed(event(chunk("a")) + b'data: {"id"') == event(chunk("a"))
    assert scanner.finish() == b""
    assert not scanner.done


def test_an_engine_that_says_it_failed_is_heard() -> None:
    for error in ({"error": {"message": "x"}}, {"object": "error", "message": "x"}):
        scanner = EventScanner(hide_usage=True)
        assert scanner.feed(event(chunk("a")) + event(error)) == event(chunk("a")) + event(error)
        assert scanner.failed


def test_what_is_no_stream_of_events_does_not_fill_the_memory() -> None:
    scanner = EventScanner(hide_usage=True)
    half = b"x" * (MAX_EVENT_BYTES // 2)
    assert scanner.feed(half) == scanner.feed(half) == b""
    with pytest.raises(ValueError, match="an event of more than"):
        scanner.feed(b"x")


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b"\xff", b'{"usage":null}', b'{"usage":{}}', b'{"usage":{"prompt_tokens":-1}}',
     b'{"usage":{"prompt_tokens":"3"}}', b'{"usage":[1]}', b"[" * 100_000],
)  # fmt: skip
def test_a_body_without_usage_has_none(body: bytes) -> None:
    assert usage_in(body) is None
