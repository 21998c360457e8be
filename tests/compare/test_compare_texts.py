"""Texts side by side: what differs, and whether that is a near tie, seen from answers, logprobs and A itself."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from bench_server import ScriptedServer, answer, text_event, whole

from sol.bench import Conversation, Endpoint, Listed, Turn, prepare
from sol.bench.statistics import Estimate
from sol.compare import Answer, Block, Pair, Plan, Round
from sol.compare.gaps import Token, ask_tokens, judge_gap
from sol.compare.http import HttpSampler, RoundLoad
from sol.compare.likelihoods import Position, compare_likelihoods, compare_positions, divergence
from sol.compare.session import Checks, compare_endpoints, with_token_ids
from sol.compare.texts import Equivalence, Own, compare_texts, compare_with_own, judged


def said(place: int, text: str, *, turn: int = 0, ids: tuple[int, ...] | None = None) -> Answer:
    return Answer(key=f"prompt-{place}", place=place, turn=turn, text=text, token_ids=ids)


def blocks_of(a: list[Answer], b: list[Answer]) -> list[Block]:
    pair = Pair(a=Round(answers=a, seconds=1.0), b=Round(answers=b, seconds=1.0), a_first=True)
    return [Block(number=0, pairs=[pair])]


def test_texts_are_compared_up_to_the_first_turn_that_differs() -> None:
    a = [said(0, "same"), said(1, "one two"), said(1, "later", turn=1), said(2, "x")]
    b = [said(0, "same"), said(1, "one too"), said(1, "other", turn=1), Answer(key="2", place=2, error="timeout")]
    found = compare_texts(blocks_of(a, b))
    assert (found.num_compared, found.unit) == (2, "characters")
    (difference,) = found.differences
    assert (difference.key, difference.position, difference.length) == ("prompt-1", 5, 7)
    assert (difference.a, difference.b) == ("one two", "one too")


def test_token_ids_tell_more_than_texts() -> None:
    a, b = [said(0, "ab", ids=(1, 2))], [said(0, "ab", ids=(1, 3, 4))]
    found = compare_texts(blocks_of(a, b))
    assert found.unit == "tokens"
    assert found.differences[0].position == 1
    # Only where both send them.
    assert compare_texts(blocks_of(a, [said(0, "ab")])).verdict == "same"


def test_an_answer_that_ends_early_differs_where_it_ends() -> None:
    (difference,) = compare_texts(blocks_of([said(0, "abc")], [said(0, "ab")])).differences
    assert difference.position == 2


def test_differences_that_nobody_judged_are_measured_by_a_itself() -> None:
    places = range(40)
    a = [said(place, "yes") for place in places]
    b = [said(place, "yes" if place % 8 else "no") for place in places]
    found = compare_texts(blocks_of(a, b))
    assert found.verdict == "differ"  # nobody asked A twice

    def against(own: list[Answer]) -> Equivalence:
        rounds = [Round(answers=own, seconds=1.0)]
        return Equivalence(
            num_compared=found.num_compared, differences=found.differences,
            own=compare_with_own(blocks_of(a, b), rounds, 1),
        )  # fmt: skip

    assert against(a).verdict == "differ"  # A always says the same, and B does not
    assert against(b).verdict == "near ties"  # A differs from itself as often
    much = Equivalence(num_compared=40, differences=found.differences * 6, own=Own(
        concurrency=1, num_compared=40, differences=found.differences[:1]))  # fmt: skip
    assert much.p_more_than_own is not None
    assert much.p_more_than_own < 1e-6
    assert much.verdict == "differ"


def test_one_real_difference_is_one_however_many_near_ties_there_are() -> None:
    a = [said(place, "yes") for place in range(3)]
    found = compare_texts(blocks_of(a, [said(place, "no") for place in range(3)]))
    ties = judged(found, {(place, 0): ("near tie", 0.01, "") for place in range(3)})
    assert ties.verdict == "near ties"
    assert judged(ties, {(1, 0): ("real", 3.0, "")}).verdict == "differ"
    assert compare_texts([]).verdict == "not compared"


def token(text: str, logprob: float, **others: float) -> Token:
    top = [(text.encode(), logprob), *((name.replace("_", " ").encode(), value) for name, value in others.items())]
    return Token(text.encode(), logprob, top)


def test_a_gap_is_that_of_the_token_at_which_texts_part() -> None:
    tokens = [token("The", -0.1), token(" cat", -0.7, _cap=-0.8, _dog=-3.0), token(" sat", -0.1)]
    assert judge_gap(tokens, "The cat sat", "The cap fits", 0.3) == (
        "near tie", pytest.approx(0.1), "to A its own token was likelier by 0.1 in logits")  # fmt: skip
    assert (judge_gap(tokens, "The cat sat", "The dog ran", 0.3) or ("",))[0] == "real"
    # A token that A did not even list is no near tie, if what it listed reaches further than one.
    kind, gap, why = judge_gap(tokens, "The cat sat", "The owl", 0.3) or ("", 0.0, "")
    assert (kind, gap) == ("real", None)
    assert "not among" in why
    assert (judge_gap([token("The", -0.1), token(" cat", -0.7, _cap=-0.8)], "The cat", "The owl", 0.3) or ("",))[0] == (
        "unknown"
    )


def test_a_longer_token_of_b_is_found_where_it_begins() -> None:
    # A: " the" + "n", B: " there" as one token: the texts part inside of it.
    tokens = [token("So", -0.1), token(" the", -0.5, _there=-0.6), token("n", -0.2, y=-2.0)]
    kind, gap, _ = judge_gap(tokens, "So then", "So there", 0.3) or ("", None, "")
    assert (kind, gap) == ("near tie", pytest.approx(0.1))


def test_an_end_is_a_token_like_any_other() -> None:
    tokens = [token("Yes", -0.1), Token(b".", -0.4, [(b".", -0.4), (b"<|im_end|>", -0.5), (b"!", -4.0)])]
    kind, gap, _ = judge_gap(tokens, "Yes.", "Yes", 0.3) or ("", None, "")
    assert (kind, gap) == ("near tie", pytest.approx(0.1))


def test_what_a_says_differently_by_now() -> None:
    tokens = [token("The", -0.1), token(" dog", -0.1)]
    assert (judge_gap(tokens, "The cat", "The owl", 0.3) or ("",))[0] == "near tie"  # there, A itself is undecided
    assert judge_gap([token("A", -0.1)], "The cat", "The owl", 0.3) is None  # it parted before: nothing is learned


def test_parts_of_characters_are_compared_as_bytes() -> None:
    first = "好".encode()
    tokens = [Token(first[:2], -0.2, [(first[:2], -0.2)]), Token(first[2:], -0.3, [(first[2:], -0.3), (b"\xa6", -0.4)])]
    kind, gap, _ = judge_gap(tokens, "好", first[:2].decode(errors="ignore") + b"\xe5\xa5\xa6".decode(), 0.3) or (
        "",
        0,
        "",
    )
    assert (kind, gap) == ("near tie", pytest.approx(0.1))


def distribution(*weights: float) -> dict[str, float]:
    return {f"t{i}": math.log(weight) for i, weight in enumerate(weights)}


def test_the_divergence_of_lists_is_a_lower_bound_that_is_exact_where_all_is_listed() -> None:
    p, q = (0.5, 0.3, 0.2), (0.4, 0.4, 0.2)
    exact = sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
    assert divergence(distribution(*p), distribution(*q)) == pytest.approx(exact)
    listed = divergence(distribution(*p[:2]), distribution(*q[:2]))
    assert 0 < listed <= exact + 1e-12
    assert divergence(distribution(*p), distribution(*p)) == pytest.approx(0, abs=1e-12)
    assert divergence({"a": -0.1}, {"b": -0.1}) == 0.0  # nothing is in both lists


def test_positions_of_both_sides_are_paired_token_by_token() -> None:
    one = Position("a", -0.5, {"a": -0.5, "b": -1.2})
    other = Position("a", -0.9, {"a": -0.9, "b": -0.7})
    found = compare_positions([[one, one], [one]], [[one, other], [one]])
    assert (found.num_texts, found.num_tokens) == (2, 3)
    assert found.top1.value == pytest.approx(2 / 3)
    assert found.logprob.value == pytest.approx(-0.4 / 3)
    assert (
        compare_positions([[one]], [[Position("x", -0.1, {})]]).reason == "A and B cut the same text into other tokens"
    )
    assert not compare_positions([[]], [[one]]).offered


class Model:
    """A scripted endpoint whose answers, logprobs and token ids are chosen."""

    def __init__(self, texts: Mapping[str, str], *, logprobs: str = "", ids: bool = False) -> None:
        self.texts = texts
        self.logprobs = logprobs
        self.ids = ids

    async def reply(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.001)
        if "messages" not in body:
            writer.write(self._prompt(body))
            return
        text = self.texts.get(body["messages"][-1]["content"], "ok")
        tokens = [f" {word}" if i else word for i, word in enumerate(text.split(" "))]
        if not body.get("stream"):
            content = [
                {"token": one, "logprob": -0.2, "bytes": None,
                 "top_logprobs": [{"token": one, "logprob": -0.2, "bytes": list(one.encode())},
                                  {"token": " blue", "logprob": -0.25, "bytes": None},
                                  {"token": " never", "logprob": -6.0, "bytes": None}]}
                for one in tokens
            ]  # fmt: skip
            choice = {"message": {"content": text}, "finish_reason": "stop", "logprobs": {"content": content}}
            writer.write(whole(200, {"choices": [choice if body.get("logprobs") else {**choice, "logprobs": None}]}))
            return
        extra = [{"token_ids": [len(one) * 7 + ord(one[-1])]} if self.ids and body.get("return_token_ids") else {}
                 for one in tokens]  # fmt: skip
        events = [text_event(one, **more) for one, more in zip(tokens, extra, strict=True)]
        writer.write(answer(*events))

    def _prompt(self, body: dict[str, Any]) -> bytes:
        words = str(body["prompt"]).split(" ")
        if self.logprobs == "vllm" and "prompt_logprobs" in body:
            listed = [None] + [
                {str(len(word)): {"logprob": -0.5, "rank": 1, "decoded_token": word},
                 "99": {"logprob": -1.5, "rank": 2, "decoded_token": "zz"}}
                for word in words[1:]
            ]  # fmt: skip
            return whole(200, {"choices": [{"text": "x", "finish_reason": "length", "prompt_logprobs": listed}]})
        if self.logprobs == "echo" and body.get("echo"):
            tops = [None, *({word: -0.7, "zz": -1.2} for word in words[1:]), {"out": -0.1}]
            found = {"tokens": [*words, "out"], "token_logprobs": [None, *[-0.7] * (len(words) - 1), -0.1],
                     "top_logprobs": tops}  # fmt: skip
            return whole(200, {"choices": [{"text": "x", "finish_reason": "length", "logprobs": found}],
                               "usage": {"completion_tokens": 1}})  # fmt: skip
        if "prompt_logprobs" in body and self.logprobs != "silent":
            return whole(400, {"error": {"message": "prompt_logprobs is not known"}})
        return whole(200, {"choices": [{"text": "x", "finish_reason": "length", "logprobs": None}]})


async def test_both_forms_of_logprobs_of_a_prompt_are_found_and_agree() -> None:
    async with (
        ScriptedServer(Model({}, logprobs="vllm").reply) as a,
        ScriptedServer(Model({}, logprobs="echo").reply) as b,
    ):
        ends = [Endpoint(url=server.url, model="m", counting="chunks") for server in (a, b)]
        found = await compare_likelihoods(ends[0], ends[1], ["one two three", "four five"], 5.0)
    assert found.offered
    assert (found.num_texts, found.num_tokens) == (2, 3)
    assert found.top1 == Estimate(1.0, n=3, n_effective=found.top1.n_effective)
    assert found.logprob.value == pytest.approx(-0.2)
    assert found.kl.value is not None
    assert found.kl.value > 0
    assert "prompt_logprobs" in a.bodies[-1]
    assert b.bodies[-1]["echo"] is True
    assert all(body["max_tokens"] == 1 for body in a.bodies)


@pytest.mark.parametrize("form", ["", "silent"])
async def test_an_endpoint_without_logprobs_of_a_prompt_is_said_to_have_none(form: str) -> None:
    async with ScriptedServer(Model({}, logprobs=form).reply) as server:
        end = Endpoint(url=server.url, model="m", counting="chunks")
        found = await compare_likelihoods(end, end, ["one two"], 5.0)
    assert not found.offered
    assert found.reason == "A does not offer logprobs of a prompt"


async def test_token_ids_are_asked_for_if_both_send_them() -> None:
    async with ScriptedServer(Model({}, ids=True).reply) as a, ScriptedServer(Model({}).reply) as b:
        with_ids, without = [await prepare(Endpoint(url=server.url)) for server in (a, b)]
        first, second = await with_token_ids(with_ids, with_ids)
        assert first.body["return_token_ids"] is True
        assert second.body["return_token_ids"] is True
        assert await with_token_ids(with_ids, without) == (with_ids, without)


async def test_a_comparison_judges_its_differences_by_asking_a_again() -> None:
    prompts = [f"prompt {i}" for i in range(4)]
    common = {prompt: f"the sky is grey {prompt}" for prompt in prompts}
    other = {**common, "prompt 1": "the sky is blue", "prompt 2": "the sky is never dark"}
    data = Listed(
        [Conversation(key=prompt, turns=[Turn(prompt=prompt, max_tokens=9)]) for prompt in prompts], shuffle=False
    )
    async with ScriptedServer(Model(common).reply) as a, ScriptedServer(Model(other).reply) as b:
        ends = [await prepare(Endpoint(url=server.url, body={"temperature": 0.0})) for server in (a, b)]
        sampler = HttpSampler(ends[0], ends[1], data, RoundLoad(prompts=2, concurrency=2), seed=4)
        outcome = await compare_endpoints(sampler, Plan(blocks=6), Checks(self_prompts=4))
    texts = outcome.texts
    assert (texts.num_compared, texts.unit) == (24, "characters")
    kinds = {one.key: (one.kind, one.gap) for one in texts.differences}
    assert kinds == {"prompt 1": ("near tie", pytest.approx(0.05)), "prompt 2": ("real", pytest.approx(5.8))}
    assert texts.verdict == "differ"
    assert texts.own is not None
    assert (texts.own.concurrency, texts.own.num_compared, list(texts.own.differences)) == (1, 4, [])
    assert outcome.exit_code in (1, 3)  # how fast two scripts are is nobody's business here
    # Both were asked the same, seeds included, as often as blocks say; then A once more.
    streams = [[json.dumps(body, sort_keys=True) for body in server.bodies if "seed" in body and body.get("stream")]
               for server in (a, b)]  # fmt: skip
    assert sorted(streams[0][:26]) == sorted(streams[1][:26])
    assert len(streams[1]) == 2 + 24
    assert len(streams[0]) == 2 + 24 + 4


async def test_logprobs_that_are_not_there_leave_a_difference_unknown() -> None:
    async with ScriptedServer(Model({}).reply) as server:
        end = Endpoint(url=server.url, model="m", counting="chunks", route="completions")
        pool = end.pool()
        found = await ask_tokens(end, pool, Turn(prompt="x", max_tokens=3), 5.0)
        pool.close()
    assert found == "A sends no logprobs"
