"""Speculation as clients meet it, with the official client against a running server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from running_server import KEY, Server, start_server

from sol.models.source import ModelFiles
from sol.text.tokenizer import Tokenizer

ENGINE: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 32 * 2**20, "max_num_seqs": 8}
MESSAGES: Any = [{"role": "user", "content": "Go on."}]
PLAIN: dict[str, Any] = {"speculation": {"enabled": False}}


@pytest.fixture(scope="module")
def server(talking_llama: Path) -> Iterator[Server]:
    """It drafts at every step, whatever that costs."""
    config = {"method": "ngram", "controller": "fixed", "num_speculative_tokens": 6}
    engine = {**ENGINE, "model": str(talking_llama), "speculative_config": config}
    with start_server(engine=engine, served_model_names=["m"], api_keys=[KEY]) as server:
        server.wait_until_ready()
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def few_tokens(smollm2: ModelFiles) -> dict[str, int]:
    """A bias that leaves a random model a few pieces of text, one of which is half of a character: who looks text up
    is often right."""
    tokenizer = Tokenizer.from_files(smollm2)
    halves = tokenizer.encode("🎉", add_special_tokens=False)
    assert len(halves) > 1
    words = [tokenizer.encode(word, add_special_tokens=False)[0] for word in (" the", " day", " a")]
    return {str(token_id): 100 for token_id in (*words, halves[0])}


@pytest.fixture(params=[{"temperature": 0}, {"temperature": 1, "seed": 11}], ids=["greedy", "sampled"])
def options(request: pytest.FixtureRequest, few_tokens: dict[str, int]) -> dict[str, Any]:
    return {
        "model": "m",
        "logit_bias": few_tokens,
        "max_tokens": 61,
        "extra_body": {"ignore_eos": True},
    } | request.param


def with_body(options: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**options, "extra_body": {**options["extra_body"], **fields}}


def usage_of(answer: Any) -> dict[str, Any]:
    usage: dict[str, Any] = answer.usage.model_dump()["speculation"]
    return usage


def test_the_answer_is_that_of_plain_decoding(client: openai.OpenAI, options: dict[str, Any]) -> None:
    drafted = client.chat.completions.create(messages=MESSAGES, n=2, **options)
    plain = client.chat.completions.create(messages=MESSAGES, n=2, **with_body(options, **PLAIN))
    assert drafted.choices == plain.choices

    usage = usage_of(drafted)
    assert usage["draft_tokens"] > usage["accepted_tokens"] > 0
    assert usage["accepted_tokens"] + usage["steps"] == 122  # each step gives what was accepted and one more
    assert usage["acceptance_rate"] == round(usage["accepted_tokens"] / usage["draft_tokens"], 4)
    assert usage["mean_acceptance_length"] == round(1 + usage["accepted_tokens"] / usage["drafts"], 4)
    assert usage["tokens_per_step"] == round(122 / usage["steps"], 4)
    assert usage["speedup"] is None or usage["speedup"] > 0
    shared = ("drafts", "draft_tokens", "accepted_tokens", "acceptance_rate", "mean_acceptance_length")
    assert usage["drafters"] == {"ngram": {name: usage[name] for name in shared}}

    usage = usage_of(plain)
    assert usage["drafters"] == {}
    assert (usage["steps"], usage["draft_tokens"], usage["tokens_per_step"]) == (122, 0, 1.0)
    assert usage["acceptance_rate"] is usage["mean_acceptance_length"] is None
    details = drafted.usage.completion_tokens_details if drafted.usage else None
    assert details is None, "OpenAI's prediction tokens are another feature's"


def test_a_stop_string_in_the_middle_of_a_step(client: openai.OpenAI, options: dict[str, Any]) -> None:
    options = options | {"prompt": "Go on."}
    text = client.completions.create(**options).choices[0].text
    for begin in range(len(text) // 2, len(text) // 2 + 40, 5):
        stopping = options | {"stop": text[begin : begin + 5]}
        drafted = client.completions.create(**stopping)
        plain = client.completions.create(**with_body(stopping, **PLAIN))
        assert drafted.choices == plain.choices
        assert drafted.choices[0].finish_reason == "stop"
        assert drafted.usage is not None
        assert plain.usage is not None
        assert drafted.usage.completion_tokens == plain.usage.completion_tokens


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 10, 11, 12])
def test_max_tokens_in_the_middle_of_a_step(client: openai.OpenAI, few_tokens: dict[str, int], max_tokens: int) -> None:
    # One word only: from the second step on, all drafts are right.
    word = dict(list(few_tokens.items())[:1])
    answer = client.completions.create(
        model="m", prompt="Go on.", logit_bias=word, max_tokens=max_tokens, temperature=0, logprobs=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.choices[0].text == " the" * max_tokens
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.token_logprobs or []) == max_tokens
    assert usage_of(answer)["steps"] <= max_tokens


def test_a_stream_says_who_made_it(client: openai.OpenAI, options: dict[str, Any]) -> None:
    options = options | {"stream": True, "n": 2}
    options["stream_options"] = {"include_usage": True, "include_speculation": True}
    with client.chat.completions.create(messages=MESSAGES, **options) as stream:
        chunks = [chunk.model_dump() for chunk in stream]
    tokens = {"ngram": 0, "target": 0}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        segments = choice["speculation"]["segments"]
        assert "".join(segment["text"] for segment in segments) == (choice["delta"]["content"] or "")
        for segment in segments:
            tokens[segment["origin"]] += segment["tokens"]
    usage = chunks[-1]["usage"]
    assert sum(tokens.values()) == usage["completion_tokens"] == 122
    assert tokens["ngram"] == usage["speculation"]["accepted_tokens"] > 0


def test_a_streamed_completion_says_who_made_it(client: openai.OpenAI, options: dict[str, Any]) -> None:
    options = options | {"prompt": ["Go on.", "And"], "stop": [" day the"], "echo": True}
    whole = client.completions.create(**options)
    options |= {"stream": True, "stream_options": {"include_usage": True, "include_speculation": True}}
    with client.completions.create(**options) as stream:
        chunks = [chunk.model_dump() for chunk in stream]
    texts, tokens = ["", ""], {"ngram": 0, "target": 0, "prompt": 0}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        segments = choice["speculation"]["segments"]
        assert "".join(segment["text"] for segment in segments) == choice["text"]
        texts[choice["index"]] += choice["text"]
        for segment in segments:
            tokens[segment["origin"]] += segment["tokens"]
    assert texts == [choice.text for choice in whole.choices]
    assert tokens["prompt"] == chunks[-1]["usage"]["prompt_tokens"]
    assert tokens["ngram"] + tokens["target"] == chunks[-1]["usage"]["completion_tokens"]
    assert whole.usage is not None
    assert chunks[-1]["usage"]["completion_tokens"] == whole.usage.completion_tokens


def test_who_does_not_ask_is_not_told(client: openai.OpenAI, options: dict[str, Any]) -> None:
    with client.chat.completions.create(messages=MESSAGES, stream=True, **options) as stream:
        assert all("speculation" not in choice.model_dump() for chunk in stream for choice in chunk.choices)


def test_metrics_are_what_the_requests_were_told(
    server: Server, client: openai.OpenAI, options: dict[str, Any]
) -> None:
    before = server.wait_until_idle()
    answers = [client.chat.completions.create(messages=MESSAGES, **options) for _ in range(2)]
    client.chat.completions.create(messages=MESSAGES, **with_body(options, **PLAIN))
    after = server.wait_until_idle()

    def counted(name: str) -> float:
        return after[name] - before[name]

    usages = [usage_of(answer) for answer in answers]
    for name, key in (("drafts", "drafts"), ("draft_tokens", "draft_tokens"), ("accepted_tokens", "accepted_tokens")):
        total = sum(usage[key] for usage in usages)
        assert counted(f"vllm:spec_decode_num_{name}_total") == total > 0
        assert counted(f"sol:speculation_{name}_total ngram") == total
    for place in (
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "sol:speculation_accepted_tokens_per_pos_total ngram",
    ):
        assert sum(counted(f"{place} {position}") for position in range(6)) == sum(u["accepted_tokens"] for u in usages)
    assert counted("sol:speculation_proposed_tokens_total ngram") >= sum(u["draft_tokens"] for u in usages)
    assert counted("sol:speculation_drafting_seconds_total ngram") > 0
    assert counted("sol:speculation_failures_total ngram") == 0
    assert counted("sol:speculation_decode_seconds_total") > 0
    # Drafts that were rejected leave no trace where tokens are counted, and a step is one latency.
    assert counted("vllm:generation_tokens_total") == 3 * 61
    steps = sum(usage["steps"] for usage in usages) + 61
    # A busy machine lets the first steps of an answer pile up: they come at once and are the time to its first token.
    assert steps - 23 <= counted("vllm:inter_token_latency_seconds_count") <= steps - 3
    assert counted("vllm:request_time_per_output_token_seconds_count") == 3


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"speculation": {"drafter": "suffix"}}, "speculation.drafter", "one of those that this engine has (ngram)"),
        ({"speculation": {"tenant": ""}}, "speculation.tenant", "1 to 256 characters"),
        ({"speculation": {"tokens": 4}}, "speculation.tokens", "unknown field"),
        ({"stream_options": {"include_speculation": True}}, "stream_options", "needs stream: true"),
    ],
)
def test_what_cannot_be_is_refused(client: openai.OpenAI, fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=param) as error:
        client.chat.completions.create(model="m", messages=MESSAGES, extra_body=fields)
    assert error.value.param == param
    assert says in error.value.message


def test_a_server_that_does_not_speculate(talking_llama: Path, few_tokens: dict[str, int]) -> None:
    engine = {**ENGINE, "model": str(talking_llama), "speculation": "off"}
    options: dict[str, Any] = {"model": "m", "messages": MESSAGES, "logit_bias": few_tokens, "max_tokens": 9}
    with start_server(engine=engine, served_model_names=["m"], api_keys=[KEY]) as server:
        server.wait_until_ready()
        with server.client() as client:
            answer = client.chat.completions.create(**options, extra_body={"speculation": {"tenant": "t"}})
            assert answer.usage is not None
            assert "speculation" not in answer.usage.model_dump()
            with pytest.raises(openai.BadRequestError, match="does not speculate"):
                client.chat.completions.create(**options, extra_body={"speculation": {"drafter": "ngram"}})
            asked: Any = {"include_speculation": True}
            with client.chat.completions.create(**options, stream=True, stream_options=asked) as stream:
                choices = [choice.model_dump() for chunk in stream for choice in chunk.choices]
            segments = [segment for choice in choices for segment in choice["speculation"]["segments"]]
            assert {segment["origin"] for segment in segments} == {"target"}
            assert sum(segment["tokens"] for segment in segments) == answer.usage.completion_tokens
        assert not any("spec" in name for name in server.metrics())
