"""Requests: refused, redacted, flagged, let pass; sizes; scopes; rules that fail."""

from __future__ import annotations

import asyncio
import contextlib
import re
import textwrap
import time
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from filter_calls import chat, make_call
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from sol.errors import ConfigError, RequestError
from sol.gateway.call import Outcome
from sol.gateway.errors import RequestTooLargeError
from sol.gateway.filters.config import Filters as FiltersSection
from sol.gateway.filters.config import InjectionRule, PiiRule, RegexRule, Scope, SizeRule, WordsRule
from sol.gateway.filters.decisions import MAX_DECISIONS
from sol.gateway.filters.detectors import BudgetError, Detection
from sol.gateway.filters.errors import ContentFilteredError, FilterFailedError
from sol.gateway.filters.filters import LONG, Filters, estimate_tokens
from sol.gateway.filters.rules import Rule, Subject
from sol.gateway.filters.stage import FilterStage

SECTION = TypeAdapter(FiltersSection)


def words(name: str = "w", *entries: str, **more: Any) -> WordsRule:
    return WordsRule(kind="words", name=name, words=entries or ("zeus",), **more)


async def test_a_refusal_names_the_rule_and_the_field_and_repeats_nothing() -> None:
    filters = Filters([words("codenames")])
    parts = [{"type": "text", "text": "Who is ＺＥ\u200bＵＳ?"}]
    call = make_call(chat({"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}))
    with pytest.raises(ContentFilteredError) as error:
        await filters.check(call)
    assert error.value.status == 400
    assert error.value.code == "content_filter"
    assert error.value.param == "messages[1].content[0].text"
    assert "codenames" in error.value.message
    [decision] = call.decisions
    assert (decision.stage, decision.rule, decision.action) == ("filter", "codenames", "reject")
    assert decision.detail.startswith("messages[1].content[0].text 7..12 words[0] #")
    assert "zeus" not in decision.detail.lower()
    assert filters.counts.decisions == {("codenames", "input", "reject", False): 1}


async def test_equal_texts_have_equal_digests_which_nobody_else_can_compute() -> None:
    filters, others = Filters([words(action="flag")]), Filters([words(action="flag")])
    first, second = (f.explain("a zeus and a zeus") for f in (filters, others))
    digests = [d.detail.partition("#")[2] for d in first]
    assert digests[0] == digests[1]
    assert digests[0] != second[0].detail.partition("#")[2]


async def test_redaction_changes_the_text_and_nothing_else() -> None:
    filters = Filters([PiiRule(kind="pii", name="pii"), words("w", action="redact", replacement="***")])
    body = chat(
        "Zeus: mail a@example.com",
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"to": "a@example.com"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sent to a@example.com"},
        temperature=0.5,
        tools=[
            {"type": "function", "function": {"name": "f", "description": "asks zeus", "parameters": {"x": ["zeus"]}}}
        ],
    )
    call = make_call(body)
    await filters.check(call)
    sent = msgspec.json.decode(call.body)
    assert sent == call.json
    assert [message["content"] for message in sent["messages"]] == ["***: mail [email]", None, "sent to [email]"]
    assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"to": "[email]"}'
    assert sent["tools"][0]["function"]["parameters"] == {"x": ["***"]}
    assert sent["temperature"] == 0.5


async def test_what_no_rule_objects_to_keeps_its_bytes() -> None:
    call = make_call(chat("hello"))
    call.body = body = b'{ "messages": [{"role":"user","content":"hello"}] }'
    await Filters([words(action="redact")]).check(call)
    assert call.body is body
    assert call.decisions == []


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/v1/completions", {"prompt": "zeus"}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "zeus"]}, "prompt[1]"),
        ("/v1/completions", {"prompt": "a", "suffix": "zeus"}, "suffix"),
        ("/v1/embeddings", {"input": ["zeus"]}, "input[0]"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "zeus"}]}]},
            "input[0].content[0].text",
        ),
        ("/v1/responses", {"input": [{"type": "function_call_output", "output": "zeus"}]}, "input[0].output"),
        ("/v1/responses", {"input": "a", "instructions": "zeus"}, "instructions"),
        (
            "/v1/chat/completions",
            chat("a", response_format={"json_schema": {"title": "zeus"}}),
            "response_format.json_schema.title",
        ),
        ("/v1/chat/completions", chat("a", chat_template="{{ 'zeus' }}"), "chat_template"),
    ],
)
async def test_every_place_for_text_is_looked_at(path: str, body: dict[str, Any], where: str) -> None:
    with pytest.raises(ContentFilteredError) as error:
        await Filters([words()]).check(make_call(body, path=path))
    assert error.value.param == where


async def test_token_ids_do_not_pass_unseen_unless_they_may() -> None:
    body = {"model": "m", "prompt": [[1, 2, 3]]}
    with pytest.raises(ContentFilteredError, match="send it as text"):
        await Filters([words()]).check(make_call(body, path="/v1/completions"))
    for rule in (words(token_ids="pass"), words(shadow=True), words(action="flag"), words(scope=Scope(roles=["tool"]))):
        await Filters([rule]).check(make_call(body, path="/v1/completions"))


@pytest.mark.parametrize("body", [{"prompt": ["a", 7]}, {"prompt": ["a", [7]]}, {"prompt_embeds": "AAAA"}])
async def test_nor_do_prompts_that_are_text_in_part(body: dict[str, Any]) -> None:
    with pytest.raises(ContentFilteredError) as error:
        await Filters([words()]).check(make_call(body, path="/v1/completions"))
    assert error.value.param == next(iter(body))


async def test_scopes() -> None:
    async def refused(scope: Scope, role: str = "user", **more: Any) -> bool:
        filters = Filters([words(scope=scope)])
        call = make_call(chat({"role": role, "content": "zeus"}, model="llama"), **more)
        try:
            await filters.check(call)
        except ContentFilteredError:
            return True
        return False

    assert await refused(Scope())
    assert await refused(Scope(roles=["user"]))
    assert not await refused(Scope(roles=["system"]))
    assert await refused(Scope(roles=["system"]), role="system")
    assert await refused(Scope(roles=["user"]), role="nobody-knows")
    assert await refused(Scope(models=["llama"]))
    assert not await refused(Scope(models=["other"]))
    assert not await refused(Scope(tenants=["other"]))
    assert not await refused(Scope(classes=["batch"]))
    assert await refused(Scope(classes=["batch"]), class_name="batch")


async def test_flags_and_shadow_rules_only_say_so() -> None:
    filters = Filters([words("a", action="flag"), words("b", shadow=True)])
    call = make_call(chat("zeus"))
    await filters.check(call)
    assert [(d.rule, d.action) for d in call.decisions] == [("a", "flag"), ("b", "shadow_reject")]
    assert call.json == chat("zeus")


async def test_findings_of_one_call_do_not_fill_the_memory() -> None:
    filters = Filters([words(action="flag")])
    call = make_call(chat("zeus " * 10_000))
    await filters.check(call)
    assert len(call.decisions) == MAX_DECISIONS
    assert filters.counts.decisions["w", "input", "flag", False] == 10_000


async def test_long_texts_do_not_stop_the_loop() -> None:
    filters = Filters([words()])
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await asyncio.sleep(0)
    before = turns
    with pytest.raises(ContentFilteredError):
        await filters.check(make_call(chat("a b " * LONG + "zeus")))
    assert turns > before
    task.cancel()
    filters.close()


@pytest.mark.parametrize(
    ("rule", "body", "param"),
    [
        ({"max_messages": 1}, chat("a", "b"), "messages"),
        ({"max_input_tokens": 10}, chat("你好" * 6), "messages"),
        ({"max_input_tokens": 10}, {"prompt": list(range(11))}, "prompt"),
    ],
)
async def test_sizes_are_refused_by_field(rule: dict[str, int], body: dict[str, Any], param: str) -> None:
    filters = Filters([SizeRule(kind="size", name="s", **rule)])
    with pytest.raises(RequestError) as error:
        await filters.check(make_call(body))
    assert error.value.param == param
    assert "at most" in error.value.message


async def test_bytes_and_output_tokens() -> None:
    with pytest.raises(RequestTooLargeError):
        await Filters([SizeRule(kind="size", name="s", max_bytes=50)]).check(make_call(chat("a" * 50)))
    filters = Filters([SizeRule(kind="size", name="s", max_output_tokens=100)])
    call = make_call(chat("a", max_completion_tokens=101))
    call.output_tokens = 101
    with pytest.raises(RequestError) as error:
        await filters.check(call)
    assert error.value.param == "max_completion_tokens"
    call.output_tokens = None
    await filters.check(call)
    flagged = Filters([SizeRule(kind="size", name="s", max_messages=1, action="flag")])
    call = make_call(chat("a", "b"))
    await flagged.check(call)
    assert [d.action for d in call.decisions] == ["flag"]


def test_tokens_are_estimated_by_script() -> None:
    assert estimate_tokens(chat("word " * 20)) == 25
    assert estimate_tokens(chat("你好")) == 2
    assert estimate_tokens({"prompt": [[1, 2], [3]]}) == 3


class Detector:
    """Finds every `bad`, slowly or not at all."""

    def __init__(self, rule: Rule, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.rule = rule
        self.budget = 0.1
        self._seconds = seconds
        self._error = error

    def detect(self, texts: Any, deadline: float) -> list[Detection]:
        if self._error:
            raise self._error
        end = time.monotonic() + self._seconds
        while time.monotonic() < end:
            if time.monotonic() > deadline:
                raise BudgetError
            time.sleep(0.005)
        return [
            Detection(n, text.index("bad"), text.index("bad") + 3, "x") for n, text in enumerate(texts) if "bad" in text
        ]


def slow(detector: dict[str, Any], *others: Any, **options: Any) -> Filters:
    rule = InjectionRule(kind="injection", name="slow", classifier={"model": "m", "tokenizer": "t"}, **options)
    return Filters([*others, rule], lambda rule: Detector(rule, **detector))


async def test_detectors_decide_like_rules() -> None:
    filters = slow({}, words("w"), action="redact")
    call = make_call(chat({"role": "system", "content": "bad"}, "a bad thing"))
    await filters.check(call)
    assert [message["content"] for message in call.json["messages"]] == ["bad", "a [redacted] thing"]
    assert [(d.rule, d.action) for d in call.decisions] == [("slow", "redact")]
    filters.close()


@pytest.mark.parametrize("detector", [{"seconds": 5.0}, {"error": RuntimeError("broken")}])
async def test_what_fails_or_takes_too_long_is_decided_by_on_error(detector: dict[str, Any]) -> None:
    for on_error in ("reject", "pass"):
        filters = slow(detector, on_error=on_error)
        call = make_call(chat("a bad thing"))
        if on_error == "reject":
            with pytest.raises(FilterFailedError) as error:
                await filters.check(call)
            assert error.value.status == 503
        else:
            await filters.check(call)
        reason = "timeout" if "seconds" in detector else "error"
        assert filters.counts.failures == {("slow", reason): 1}
        assert [d.action for d in call.decisions] == [on_error]
        filters.close()


async def test_a_shadow_rule_that_fails_refuses_nobody() -> None:
    filters = slow({"error": RuntimeError("broken")}, shadow=True)
    await filters.check(make_call(chat("a bad thing")))
    assert filters.counts.failures == {("slow", "error"): 1}
    filters.close()


async def test_requests_that_wait_for_a_slow_detector_run_out_of_time_and_do_not_pile_up() -> None:
    filters = slow({"seconds": 0.07})
    outcomes = await asyncio.gather(
        *(filters.check(make_call(chat("fine"))) for _ in range(6)), return_exceptions=True
    )  # one at a time, 0.1 s each may take
    assert outcomes[0] is None
    assert all(isinstance(outcome, FilterFailedError) for outcome in outcomes[2:])
    await filters.check(make_call(chat("fine")))
    filters.close()


async def test_the_stage_refuses_before_and_filters_after() -> None:
    stage = FilterStage(Filters([words("w", direction="both")]))
    await stage.start()
    with pytest.raises(ContentFilteredError):
        await stage.enter(make_call(chat("zeus")))
    call = make_call(chat("hi"))
    await stage.enter(call)
    [output] = call.output_filters
    answer = output.feed(b'{"choices":[{"index":0,"message":{"content":"It is Zeus"},"finish_reason":"stop"}]}')
    assert msgspec.json.decode(answer)["choices"][0] == {
        "index": 0,
        "message": {"content": "It is "},
        "finish_reason": "content_filter",
    }
    await stage.leave(call, Outcome(status=200))
    await stage.leave(call, Outcome(status=200))
    gone = weakref.ref(output)
    del call, output
    assert gone() is None  # at once, without the garbage collector
    await stage.close()


def test_explain_says_what_would_happen_and_counts_nothing() -> None:
    filters = Filters([words("in"), words("out", "hera", direction="output"), words("t", scope=Scope(tenants=["x"]))])
    assert [(d.rule, d.action) for d in filters.explain("Zeus and Hera")] == [("in", "reject")]
    assert [d.rule for d in filters.explain("Zeus and Hera", direction="output")] == ["out"]
    assert [d.rule for d in filters.explain("Zeus", subject=Subject(tenant="x"))] == ["in", "t"]
    assert filters.counts.decisions == {}


def test_word_lists(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("# names\nZeus\n\n机密\ncafé\n", encoding="utf-8")
    filters = Filters([WordsRule(kind="words", name="w", file=path)])
    hits = {
        text: len(filters.explain(text))
        for text in ("zeus", "Zeus's", "zeusy", "这是机密文件", "CAFE\u0301", "café", "cafes", "x-zeus机")
    }
    assert hits == {
        "zeus": 1,
        "Zeus's": 1,
        "zeusy": 0,
        "这是机密文件": 1,
        "CAFE\u0301": 1,
        "café": 1,
        "cafes": 0,
        "x-zeus机": 1,
    }
    assert len(Filters([words("w", whole_words=False)]).explain("amazeusy")) == 1
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no words"):
        Filters([WordsRule(kind="words", name="w", file=path)])
    with pytest.raises(ConfigError, match="cannot be read"):
        Filters([WordsRule(kind="words", name="w", file=tmp_path / "missing")])
    with pytest.raises(ConfigError, match="nothing of it can be seen"):
        Filters([words("w", "\u200b")])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kind": "regex", "patterns": ["ok", "a(b"]}, r"patterns\[1\], 'a\(b': RE2 cannot read it: missing \)"),
        ({"kind": "regex", "patterns": ["a[z-a]"]}, r"patterns\[0\].*at character 2"),
        ({"kind": "regex", "patterns": ["x*"]}, "matches the empty text"),
        ({"kind": "regex", "patterns": ["x+"], "direction": "output"}, "of any length"),
        ({"kind": "regex", "patterns": ["x"], "replacement": '"'}, "must remain JSON"),
        ({"kind": "words"}, "needs words or a file"),
        ({"kind": "size"}, "needs one of max_bytes"),
        ({"kind": "size", "max_bytes": 1, "action": "redact"}, "'reject' or 'flag'"),
        ({"kind": "pii", "direction": "output", "presidio": {}}, "input only"),
        ({"kind": "injection", "direction": "output"}, "'input'"),
        ({"kind": "words", "words": ["a"], "colour": 1}, "Extra inputs"),
        ({"kind": "magic"}, "magic"),
    ],
)
def test_wrong_configurations_do_not_load(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SECTION.validate_python([{"name": "r", **entry}])


def test_names_differ() -> None:
    with pytest.raises(ValidationError, match="'a' is there twice"):
        SECTION.validate_python([{"kind": "words", "name": "a", "words": ["x"]}] * 2)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "text", "tool_calls", "function", "arguments", "type", "prompt", "x"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.sampled_from(["messages", "prompt", "input", "tools", "suffix", "system", "response_format"]), json_values
    )
)
def test_no_body_breaks_the_filters(body: dict[str, Any]) -> None:
    call = make_call({"model": "m", **body})
    with contextlib.suppress(RequestError):
        asyncio.run(FUZZED.check(call))
    assert msgspec.json.decode(call.body) == call.json


FUZZED = Filters(
    [
        words("w", "a", action="redact"),
        RegexRule(kind="regex", name="r", patterns=("b",)),
        SizeRule(kind="size", name="s", max_messages=2, max_input_tokens=5),
    ]
)


def test_the_documented_examples_are_right() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(?:^    .*\n)+", page.partition("\n## Filters\n")[2], re.MULTILINE)
    examples = [yaml.safe_load(textwrap.dedent(block)) for block in blocks if "kind:" in block]
    assert len(examples) == 2
    for example in examples:
        SECTION.validate_python(example["filters"] if isinstance(example, dict) else example)
