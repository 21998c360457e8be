"""A text in pieces: however it is cut, the same comes out, and as early as can be."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sol.gateway.filters.config import PiiRule, RegexRule, WordsRule
from sol.gateway.filters.output import AnswerFilter, OutputRules
from sol.gateway.filters.rules import Hit, Rule, RuleSet, compile_rules
from sol.gateway.filters.window import Window


def never(rule: Rule, error: Exception) -> None:
    raise error


def rule_set(*configs: Any) -> RuleSet:
    return compile_rules(configs, streaming=True)


REDACT = rule_set(
    WordsRule(
        kind="words",
        name="words",
        words=("cat", "caterpillar", "ab", "bcd", "ßs", "机密"),
        action="redact",
        whole_words=False,
        replacement="<w>",
    ),
    WordsRule(kind="words", name="whole", words=("dog", "dog house", "é"), action="redact", replacement="<h>"),
    RegexRule(
        kind="regex",
        name="expressions",
        patterns=(r"\bx[0-9]{2,4}\b", "ab{1,3}c", "bb?", r"(?m)^q.", r"z$"),
        action="redact",
        replacement="<e>",
    ),
    PiiRule(kind="pii", name="pii", entities=("email", "card")),
)
REJECT = rule_set(
    WordsRule(kind="words", name="words", words=("cat", "ab"), action="redact", whole_words=False, replacement="<w>"),
    RegexRule(kind="regex", name="stop", patterns=(r"\bx[0-9]{2,4}\b", "abc?d"), action="reject"),
)

pieces = st.lists(
    st.one_of(
        st.text(st.sampled_from("abcdtxqz019 .\n@é中ßs\u200bＡ-"), max_size=4),
        st.sampled_from(
            [
                "cat",
                "caterpillar",
                "dog",
                " dog house ",
                "x12",
                "机",
                "密",
                "a.b@example.com",
                "4111 1111 1111 1111",
                "abbc",
                "ca\u200bt",
                "ＣＡＴ",
            ]
        ),
    ),
    max_size=12,
)


def in_pieces(rules: RuleSet, parts: list[str]) -> tuple[str, list[tuple[str, int, int]]]:
    window = Window(rules, frozenset(range(len(rules.rules))), never)
    out, hits = [], []
    for index, part in enumerate([*parts, ""]):
        released = window.feed(part, final=index == len(parts))
        out.append(released.text)
        hits += [(hit.rule.config.name, hit.start, hit.end) for hit in released.hits]
    assert window.pending == 0 or rules is REJECT
    return "".join(out), hits


@settings(max_examples=300)
@given(pieces)
@example(["ab", "bc", "d"])
@example(["x1", "2", "3", "4", "5"])
@example(["ß", "s"])
@example(["cat\u200b", "erpillar"])
def test_where_a_text_is_cut_makes_no_difference(parts: list[str]) -> None:
    text = "".join(parts)
    for rules in (REDACT, REJECT):
        expected = in_pieces(rules, [text])
        assert in_pieces(rules, parts) == expected
        assert in_pieces(rules, list(text)) == expected


@given(pieces)
def test_a_whole_answer_and_a_stream_are_filtered_alike(parts: list[str]) -> None:
    import msgspec

    text = "".join(parts)
    for rules in (REDACT, REJECT):
        numbers = frozenset(range(len(rules.rules)))
        found: list[Hit] = []
        answer = AnswerFilter(
            OutputRules((rules, numbers), None, lambda hit, where, found=found: found.append(hit), never)
        )
        body = {"choices": [{"index": 0, "message": {"content": text}, "finish_reason": "stop"}]}
        choice = msgspec.json.decode(answer.feed(msgspec.json.encode(body)))["choices"][0]
        expected, hits = in_pieces(rules, parts)
        assert choice["message"]["content"] == expected
        assert [(hit.rule.config.name, hit.start, hit.end) for hit in found] == hits
        rejected = any(name == "stop" for name, _, _ in hits)
        assert choice["finish_reason"] == ("content_filter" if rejected else "stop")


def test_only_what_may_become_a_match_is_held_back() -> None:
    window = Window(REDACT, frozenset(range(4)), never)
    assert window.feed("hello, ").text == "hello, "
    assert window.feed("!! cater").text == "!! "
    assert window.pending == len("cater")
    # It cannot become a caterpillar any more, so the cat is found, and the rest may still begin an address.
    assert window.feed("? ").text == "<w>er? "
    assert window.pending == 0


def test_what_is_held_back_has_a_longest_length() -> None:
    rules = rule_set(RegexRule(kind="regex", name="r", patterns=("a[0-9]{1,10}b",), action="redact"))
    window = Window(rules, frozenset({0}), never)
    window.feed("a")
    held = []
    for _ in range(100):
        window.feed("1")
        held.append(window.pending)
    assert max(held) == 11
    assert held[-1] == 0


def test_a_rejection_keeps_what_came_before_and_ends_the_text() -> None:
    window = Window(REJECT, frozenset(range(2)), never)
    assert window.feed("a cat and x12").text == "a <w> and "
    released = window.feed(" more")
    assert released.text == ""
    assert released.rejected is not None
    assert released.rejected.rule.config.name == "stop"
    assert window.feed("anything", final=True).text == ""


def test_rules_out_of_scope_neither_change_nor_report() -> None:
    window = Window(REDACT, frozenset({1}), never)
    released = window.feed("cat dog ", final=True)
    assert released.text == "cat <h> "
    assert [hit.rule.config.name for hit in released.hits] == ["whole"]


def test_a_set_that_ran_out_of_memory_hides_nothing() -> None:
    class Empty:
        """What RE2's set says then: that nothing matches."""

        def Match(self, data: bytes) -> list[int]:
            return []

    rules = rule_set(RegexRule(kind="regex", name="r", patterns=("cat", "dog"), action="redact"))
    rules.matcher._set = Empty()
    hits = rules.find("a dog, a cat", never, frozenset({0}))
    assert [hit.text for hit in hits] == ["dog", "cat"]
