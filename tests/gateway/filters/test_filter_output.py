"""Answers and streams of events: redacted, ended, left alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from filter_calls import chat, chunk, event, events, joined, make_call
from hypothesis import given
from hypothesis import strategies as st

from sol.errors import RequestError
from sol.gateway.call import Call, OutputFilter
from sol.gateway.filters.config import PiiRule, RegexRule, Scope, WordsRule
from sol.gateway.filters.errors import FilterFailedError
from sol.gateway.filters.filters import Filters

FILTERS = Filters(
    [
        WordsRule(kind="words", name="names", words=("codename zeus",), action="redact", direction="both"),
        WordsRule(kind="words", name="stop", words=("forbidden",), direction="output"),
        PiiRule(kind="pii", name="pii", entities=("email",), direction="output"),
        WordsRule(kind="words", name="noted", words=("curious",), action="flag", direction="output"),
        RegexRule(kind="regex", name="trial", patterns=("answer",), direction="output", shadow=True),
        WordsRule(kind="words", name="other", words=("hello",), direction="output", scope=Scope(tenants=["other"])),
    ]
)
DONE = b"data: [DONE]\n\n"


def stream_filter(**more: Any) -> tuple[Call, OutputFilter]:
    call = make_call(chat("hi", stream=True, **more))
    output = FILTERS.output(call)
    assert output is not None
    return call, output


def through(*parts: bytes) -> tuple[bytes, Call]:
    call, output = stream_filter()
    return b"".join([output.feed(part) for part in parts]) + output.finish(), call


TEXT = "Ask codename zeus, or write to a.b@example.com. Curious 中文，é"


@given(st.lists(st.integers(0, 3000), max_size=8), st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_any_cut_of_the_text_and_of_the_bytes_gives_the_same(byte_cuts: list[int], text_cuts: list[int]) -> None:
    places = [0, *sorted(text_cuts), len(TEXT)]
    data = chunk({"role": "assistant", "content": ""})
    data += b"".join(chunk({"content": TEXT[a:b]}) for a, b in pairwise(places))
    data += chunk({}, finish="stop") + event({"id": "c1", "choices": [], "usage": {"total_tokens": 9}}) + DONE
    cuts = [0, *sorted(min(cut, len(data)) for cut in byte_cuts), len(data)]
    out, _ = through(*(data[a:b] for a, b in pairwise(cuts)))
    assert joined(out) == "Ask [redacted], or write to [email]. Curious 中文，é"
    said = events(out)
    assert said[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [c["finish_reason"] for e in said[:-2] for c in e["choices"]][-1] == "stop"
    assert said[-2]["usage"] == {"total_tokens": 9}
    assert said[-1] == "[DONE]"


def test_what_nothing_changes_passes_as_the_bytes_it_came_in() -> None:
    odd = b'data: {"choices" : [ {"index":0,"delta":{"content":"Fine, 1.0 "}} ], "x":1.50}\n\n'
    out, _ = through(b": ping\n\n", odd, b"data: [DONE]\n\n")
    assert out == b": ping\n\n" + odd + b"data: [DONE]\n\n"


def test_held_back_text_is_sent_before_what_follows_it() -> None:
    _, output = stream_filter()
    assert joined(output.feed(chunk({"content": "the codename "}))) == "the "
    assert output.feed(chunk({"content": "zeu"})) == b""
    assert joined(output.feed(chunk({"content": "x! "}))) == "codename zeux! "
    assert joined(output.feed(chunk({"content": "a codename"}))) == "a "
    last = output.feed(chunk({}, finish="length"))
    assert [choice["finish_reason"] for item in events(last) for choice in item["choices"]] == [None, "length"]
    assert joined(last) == "codename"
    assert output.finish() == b""


def test_a_stream_that_breaks_off_still_gives_what_was_held_back() -> None:
    out, _ = through(chunk({"content": "the codename"}))
    assert joined(out) == "the codename"
    out, _ = through(chunk({"content": "the codename"}), event({"error": {"message": "dead"}}))
    assert joined(out) == "the codename"
    assert events(out)[-1] == {"error": {"message": "dead"}}


def test_a_rejected_choice_ends_and_the_others_go_on() -> None:
    out, call = through(
        chunk({"content": "It is for"}),
        chunk({"content": "Hello "}, index=1),
        chunk({"content": "bidden to "}),
        chunk({"content": "say"}),
        chunk({"content": "you"}, index=1),
        chunk({}, finish="stop"),
        chunk({}, index=1, finish="stop"),
        event({"choices": [], "usage": {"completion_tokens": 7}}),
    )
    assert joined(out) == "It is "
    assert joined(out, index=1) == "Hello you"
    ends = {c["index"]: c["finish_reason"] for e in events(out) for c in e["choices"] if c["finish_reason"]}
    assert ends == {0: "content_filter", 1: "stop"}
    assert events(out)[-1]["usage"] == {"completion_tokens": 7}
    assert [(d.rule, d.action) for d in call.decisions] == [("stop", "reject")]


def test_what_is_forbidden_at_the_very_end_is_found_when_the_stream_ends() -> None:
    for last in (chunk({}, finish="stop"), chunk({"content": ""}, finish="stop"), b""):
        out, _ = through(chunk({"content": "It is forbidden"}), last, DONE)
        assert joined(out) == "It is "
        assert [c["finish_reason"] for e in events(out)[:-1] for c in e["choices"]][-1] == "content_filter"
    out, _ = through(chunk({"content": "It is forbidden"}, finish="stop"))
    assert joined(out) == "It is "
    assert events(out)[-1]["choices"][0]["finish_reason"] == "content_filter"


def test_each_choice_and_each_tool_call_has_a_text_of_its_own() -> None:
    def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, "function": {"arguments": arguments}, **more}]}

    out, _ = through(
        chunk({"reasoning_content": "mail x@exam"}),
        chunk({"reasoning_content": "ple.com now codename"}),
        chunk({"content": " zeus"}),
        chunk(call(0, '{"to": "x@exa', id="a")),
        chunk(call(0, 'mple.com"}')),
        chunk(call(1, '{"who": "codename', id="b")),
        chunk(call(1, ' zeus"}')),
        chunk({}, finish="tool_calls"),
    )
    assert joined(out, "delta", "reasoning_content") == "mail [email] now codename"
    assert joined(out) == " zeus"
    arguments = {0: "", 1: ""}
    for item in events(out):
        for part in item["choices"][0]["delta"].get("tool_calls", ()):
            arguments[part["index"]] += part["function"]["arguments"]
    assert {index: msgspec.json.decode(text) for index, text in arguments.items()} == {
        0: {"to": "[email]"},
        1: {"who": "[redacted]"},
    }


def test_legacy_completions_keep_their_form() -> None:
    call = make_call({"model": "m", "prompt": "hi", "stream": True}, path="/v1/completions")
    output = FILTERS.output(call)
    assert output is not None
    out = output.feed(event({"id": "c", "choices": [{"index": 0, "text": "a codename", "finish_reason": None}]}))
    out += output.feed(event({"id": "c", "choices": [{"index": 0, "text": " zeus.", "finish_reason": "stop"}]}))
    assert joined(out, "text") == "a [redacted]."
    assert events(out)[-1]["choices"][0]["finish_reason"] == "stop"


def test_windows_line_ends_and_characters_that_end_lines() -> None:
    data = chunk({"content": "a\u2028 codename zeus\x85 "}).replace(b"\n", b"\r\n") + b"event: x\ndata: [DONE]\n\n"
    out, _ = through(*(data[i : i + 1] for i in range(len(data))))
    assert b"\xe2\x80\xa8" not in out
    assert joined(out.partition(b"event")[0]) == "a\u2028 [redacted]\x85 "
    assert out.endswith(b"event: x\ndata: [DONE]\n\n")


def test_a_whole_answer_is_filtered_and_its_usage_left() -> None:
    call = make_call(chat("hi"))
    output = FILTERS.output(call)
    assert output is not None
    body = {
        "id": "c",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "codename zeus is curious"},
                "finish_reason": "stop",
            },
            {
                "index": 1,
                "message": {"content": "It is forbidden. a@b.com", "tool_calls": None},
                "finish_reason": "stop",
            },
        ],
        "usage": {"completion_tokens": 5},
    }
    answer = msgspec.json.decode(output.feed(msgspec.json.encode(body)))
    assert [c["message"]["content"] for c in answer["choices"]] == ["[redacted] is curious", "It is "]
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop", "content_filter"]
    assert answer["usage"] == {"completion_tokens": 5}
    assert {(d.rule, d.action) for d in call.decisions} == {("names", "redact"), ("noted", "flag"), ("stop", "reject")}
    untouched = b'{ "choices": [{"message":{"content":"Fine."}}] }'
    assert output.feed(untouched) == untouched
    assert output.finish() == b""


def test_flags_and_shadow_rules_hold_nothing_back_and_are_counted() -> None:
    filters = Filters(
        [
            WordsRule(kind="words", name="noted", words=("curious",), action="flag", direction="output"),
            WordsRule(kind="words", name="trial", words=("answer",), direction="output", shadow=True),
        ]
    )
    call = make_call(chat("hi", stream=True, logprobs=True))
    output = filters.output(call)
    assert output is not None
    data = [chunk({"content": text}) for text in ("a cur", "ious ans", "wer")]
    assert [output.feed(part) for part in data] == data
    assert output.finish() == b""
    assert [(d.rule, d.action, d.detail.split()[:3]) for d in call.decisions] == [
        ("noted", "flag", ["choices[0].content", "2..9", "words[0]"]),
        ("trial", "shadow_reject", ["choices[0].content", "10..16", "words[0]"]),
    ]
    assert filters.counts.decisions == {("noted", "output", "flag", False): 1, ("trial", "output", "reject", True): 1}


@pytest.mark.parametrize("field", [{"logprobs": True}, {"return_token_ids": True}])
def test_tokens_of_withheld_text_are_refused_by_name(field: dict[str, bool]) -> None:
    with pytest.raises(RequestError, match=next(iter(field))):
        FILTERS.output(make_call(chat("hi", **field)))


def test_paths_whose_answers_nobody_here_can_read_are_refused() -> None:
    with pytest.raises(RequestError, match="/v1/responses"):
        FILTERS.output(make_call({"model": "m", "input": "hi"}, path="/v1/responses"))
    assert FILTERS.output(make_call({"model": "m", "input": "hi"}, path="/v1/embeddings")) is None


def test_what_is_not_json_does_not_pass_unseen() -> None:
    _, output = stream_filter()
    with pytest.raises(FilterFailedError):
        output.feed(b"data: {half\n\n")
    lenient = Filters([WordsRule(kind="words", name="w", words=("x",), direction="output", on_error="pass")])
    call = make_call(chat("hi", stream=True))
    output = lenient.output(call)  # type: ignore[assignment]
    assert output.feed(b"data: {half\n\n") == b"data: {half\n\n"
    assert lenient.counts.failures == {("w", "error"): 1}
    assert [d.action for d in call.decisions] == ["pass"]


def whole(body: Any) -> tuple[Any, Call]:
    call = make_call(chat("hi"))
    output = FILTERS.output(call)
    assert output is not None
    return msgspec.json.decode(output.feed(msgspec.json.encode(body))), call


def test_a_rejected_answer_keeps_no_call_of_a_tool_that_was_cut() -> None:
    def tool(arguments: str) -> dict[str, Any]:
        return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}

    message = {
        "reasoning_content": "thinking",
        "content": "ok",
        "tool_calls": [tool('{"a": 1}'), tool('{"a": "forbidden"}')],
    }
    answer, call = whole({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})
    [choice] = answer["choices"]
    assert choice["message"] == {"reasoning_content": "thinking", "content": "ok", "tool_calls": [tool('{"a": 1}')]}
    assert choice["finish_reason"] == "content_filter"
    assert call.decisions[0].detail.startswith("choices[0].tool_calls[1].arguments 7..16")
    # Its thoughts are forbidden, so nothing that follows them is there.
    message = {"reasoning_content": "a forbidden thought", "content": "ok", "tool_calls": [tool("{}")]}
    [choice] = whole({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})[0]["choices"]
    assert choice["message"] == {"reasoning_content": "a ", "content": "", "tool_calls": None}


def test_a_stream_cut_in_a_tool_call_ends_there() -> None:
    delta = {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "f", "arguments": '{"a": "forbid'}}]}
    more = {"tool_calls": [{"index": 0, "function": {"arguments": 'den"}'}}]}
    out, call = through(chunk({"content": "ok"}), chunk(delta), chunk(more), chunk({}, finish="tool_calls"))
    said = events(out)
    assert said[-1]["choices"][0]["finish_reason"] == "content_filter"
    arguments = [t["function"]["arguments"] for e in said for t in e["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(arguments) == '{"a": "'
    assert [d.rule for d in call.decisions] == ["stop"]


def test_functions_of_the_older_form_are_looked_at() -> None:
    out, _ = through(
        chunk({"function_call": {"name": "f", "arguments": '{"a": "codename'}}),
        chunk({"function_call": {"arguments": ' zeus"}'}}),
        chunk({"function_call": {"arguments": "codename"}}),
        chunk({}, finish="function_call"),
    )
    arguments = [e["choices"][0]["delta"].get("function_call", {}).get("arguments", "") for e in events(out)]
    assert "".join(arguments) == '{"a": "[redacted]"}codename'
    message = {"content": None, "function_call": {"name": "f", "arguments": '{"a": "codename zeus"}'}}
    answer, _ = whole({"choices": [{"message": message, "finish_reason": "stop"}]})
    assert answer["choices"][0]["message"]["function_call"]["arguments"] == '{"a": "[redacted]"}'


@pytest.mark.parametrize("body", [{"error": {"message": "no"}}, [], {"choices": None}, {"choices": [None, {}]}, 7])
def test_answers_without_a_text_pass(body: Any) -> None:
    assert whole(body)[0] == body
    out, _ = through(event(body))
    assert events(out) == [body]


def test_an_answer_that_is_no_json_does_not_pass_unseen() -> None:
    output = FILTERS.output(make_call(chat("hi")))
    assert output is not None
    assert output.feed(b"") == b""
    with pytest.raises(FilterFailedError):
        output.feed(b"<html>")


def test_an_event_without_an_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sol.gateway.filters.output.MAX_EVENT_BYTES", 100)
    _, output = stream_filter()
    assert output.feed(b"data: " + b"x" * 90) == b""
    with pytest.raises(FilterFailedError):
        output.feed(b"x" * 10)


def test_whole_answers_are_watched_as_well() -> None:
    _, call = whole({"choices": [{"index": 2, "message": {"content": "a curious answer"}, "finish_reason": "stop"}]})
    assert [(d.rule, d.action, d.detail.split()[0]) for d in call.decisions] == [
        ("noted", "flag", "choices[2].content"),
        ("trial", "shadow_reject", "choices[2].content"),
    ]


@pytest.mark.parametrize(
    "choice",
    [
        {"text": "fine", "message": {"role": "assistant", "content": "a secret"}},
        {"delta": {"content": "fine", "reasoning_content": "a secret"}},
        {"delta": {"content": "fine"}, "text": "a secret"},
        {"delta": {"content": "fine", "tool_calls": [{"index": 0, "function": {"arguments": "a secret"}}]}},
        {"index": None, "delta": {"content": "a secret"}},
        {"index": True, "text": "a secret"},
    ],
)
def test_a_text_beside_the_usual_one_is_looked_at(choice: dict[str, Any]) -> None:
    """Chunks of the usual form are read by a shorter way, which must not be taken for others."""
    filters = Filters([WordsRule(kind="words", name="w", words=("secret",), direction="output")])
    output = filters.output(make_call(chat("hi", stream=True)))
    assert output is not None
    sent = output.feed(event({"id": "x", "choices": [choice]})) + output.finish()
    assert b"secret" not in sent
    assert filters.counts.decisions
