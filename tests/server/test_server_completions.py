"""The official client against a running server: `/v1/completions`, `/tokenize`, `/detokenize`, `/v1/models`."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from running_server import ENGINE, Server

from sol.models.source import ModelFiles
from sol.text.chat_template import load_chat_template
from sol.text.tokenizer import Tokenizer

GREEDY: dict[str, Any] = {"model": "smollm2", "temperature": 0}
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def tokenizer(smollm2: ModelFiles) -> Tokenizer:
    return Tokenizer.from_files(smollm2)


def test_an_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=4)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    (choice,) = answer.choices
    assert "Paris" in choice.text
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 4)


def test_sixteen_tokens_unless_asked(client: openai.OpenAI) -> None:
    answer = client.completions.create(**GREEDY, prompt=PROMPT, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_all_forms_of_a_prompt_mean_the_same(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(PROMPT)
    other_ids = tokenizer.encode("Water is made of")
    forms: list[Any] = [PROMPT, [PROMPT, "Water is made of"], token_ids, [token_ids, other_ids]]
    answers = [client.completions.create(**GREEDY, prompt=form, max_tokens=3) for form in forms]
    assert [len(answer.choices) for answer in answers] == [1, 2, 1, 2]
    assert len({answer.choices[0].text for answer in answers}) == 1
    assert answers[1].choices[1].text == answers[3].choices[1].text
    assert answers[3].usage is not None
    assert answers[3].usage.prompt_tokens == len(token_ids) + len(other_ids)


def test_the_index_is_prompt_times_n_plus_choice(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "smollm2", "prompt": ["One", "Two"], "n": 2, "seed": 5, "max_tokens": 3}
    whole = client.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    alone = client.completions.create(**{**options, "prompt": "Two"})
    assert [choice.text for choice in whole.choices[2:]] == [choice.text for choice in alone.choices]
    texts = [""] * 4
    with client.completions.create(**options, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage or chunks[-1].usage is not None


@pytest.mark.parametrize("extra", [{}, {"logprobs": 1}, {"echo": True, "logprobs": 0}])
def test_best_of(client: openai.OpenAI, extra: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": "smollm2", "prompt": ["One", "Two"], "seed": 5, "max_tokens": 4} | extra
    options["temperature"] = 2.0
    everything = client.completions.create(**{**options, "logprobs": 1}, n=4)
    best = client.completions.create(**options, n=2, best_of=4)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs[-4:]) / 4

    ranked = [sorted(everything.choices[a : a + 4], key=mean, reverse=True)[:2] for a in (0, 4)]
    assert [choice.text for choice in best.choices] == [choice.text for two in ranked for choice in two]
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all((choice.logprobs is None) == ("logprobs" not in extra) for choice in best.choices)
    assert best.usage is not None
    assert everything.usage is not None
    assert best.usage.completion_tokens == everything.usage.completion_tokens
    assert best.usage.prompt_tokens == everything.usage.prompt_tokens


def test_echo(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    plain = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=3).choices[0].text
    for prompt in (PROMPT, tokenizer.encode(PROMPT)):
        answer = client.completions.create(**GREEDY, prompt=prompt, max_tokens=3, echo=True)
        assert answer.choices[0].text == PROMPT + plain
        with client.completions.create(**GREEDY, prompt=prompt, max_tokens=3, echo=True, stream=True) as stream:
            assert "".join(chunk.choices[0].text for chunk in stream) == PROMPT + plain


def test_legacy_logprobs(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, "prompt": PROMPT, "max_tokens": 5, "logprobs": 2}
    choice = client.completions.create(**options).choices[0]
    shape = choice.logprobs
    assert shape is not None
    assert set(shape.model_dump()) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert shape.tokens is not None
    assert shape.token_logprobs is not None
    assert shape.top_logprobs is not None
    assert shape.text_offset is not None
    assert "".join(shape.tokens) == choice.text
    for token, logprob, top, offset in zip(
        shape.tokens, shape.token_logprobs, shape.top_logprobs, shape.text_offset, strict=True
    ):
        assert choice.text[offset:].startswith(token)
        assert len(top) == 2
        assert max(top, key=lambda name: top[name]) == token
        assert top[token] == logprob
    streamed: dict[str, list[Any]] = {key: [] for key in shape.model_dump()}
    with client.completions.create(**options, stream=True) as stream:
        for chunk in stream:
            if chunk.choices[0].logprobs is not None:
                for key, values in chunk.choices[0].logprobs.model_dump().items():
                    streamed[key] += values
    assert streamed["tokens"] == shape.tokens
    assert streamed["text_offset"] == shape.text_offset


def test_a_text_is_judged(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """What lm-evaluation-harness sends, and what it reads."""
    token_ids = tokenizer.encode(PROMPT)
    options: dict[str, Any] = {**GREEDY, "echo": True, "logprobs": 1}
    plain = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=2, logprobs=1).choices[0]
    assert plain.logprobs is not None
    for prompt in (token_ids, PROMPT):
        choice = client.completions.create(**options, prompt=prompt, max_tokens=2).choices[0]
        shape = choice.logprobs
        assert shape is not None
        assert shape.tokens is not None
        assert shape.text_offset is not None
        assert shape.token_logprobs is not None
        assert shape.top_logprobs is not None
        assert choice.text == PROMPT + plain.text
        assert "".join(shape.tokens) == choice.text
        assert all(choice.text[o:].startswith(t) for o, t in zip(shape.text_offset, shape.tokens, strict=True))
        assert shape.token_logprobs[0] is None
        assert shape.top_logprobs[0] is None
        assert shape.token_logprobs[5:] == plain.logprobs.token_logprobs
        assert len(shape.token_logprobs) == len(token_ids) + 2
        for logprob, top in zip(shape.token_logprobs[1:], shape.top_logprobs[1:], strict=True):
            assert logprob <= max(top.values())
        with client.completions.create(**options, prompt=prompt, max_tokens=2, stream=True) as stream:
            chunks = [chunk.choices[0] for chunk in stream]
        assert "".join(chunk.text for chunk in chunks) == choice.text
        streamed = [chunk.logprobs.model_dump() for chunk in chunks if chunk.logprobs is not None]
        for key, values in shape.model_dump().items():
            assert [entry for part in streamed for entry in part[key]] == values


def test_nothing_but_the_prompt(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, "echo": True, "logprobs": 0, "max_tokens": 0, "prompt": [PROMPT, "Two"]}
    answer = client.completions.create(**options)
    assert [choice.text for choice in answer.choices] == [PROMPT, "Two"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.token_logprobs or ()) == 5
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    with client.completions.create(**options, stream=True) as stream:
        texts = ["", ""]
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [PROMPT, "Two"]


def test_prompt_logprobs_in_vllms_form(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    extra = {"prompt_logprobs": 1}
    answer = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=1, extra_body=extra).choices[0]
    entries = answer.model_dump()["prompt_logprobs"]
    token_ids = tokenizer.encode(PROMPT)
    assert entries[0] is None
    for token_id, entry in zip(token_ids[1:], entries[1:], strict=True):
        said = entry[str(token_id)]
        assert said["decoded_token"] == tokenizer.decode([token_id])
        assert said["rank"] >= 1
        assert {other["rank"] for other in entry.values()} >= {1}
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    reply = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=1, extra_body=extra)
    assert reply.usage is not None
    assert len(reply.model_dump()["prompt_logprobs"]) == reply.usage.prompt_tokens


def test_the_sampled_token_is_among_the_alternatives(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2", prompt=PROMPT, max_tokens=6, temperature=2, seed=1, logprobs=1, extra_body={"ignore_eos": True}
    )
    shape = answer.choices[0].logprobs
    assert shape is not None
    tops = shape.top_logprobs or []
    assert all(token in top for token, top in zip(shape.tokens or [], tops, strict=True))
    assert any(len(top) == 2 for top in tops)


def test_whole_characters_only(client: openai.OpenAI) -> None:
    # Each of these characters is several tokens. After eight the model is in the middle of the third.
    options: dict[str, Any] = {**GREEDY, "prompt": "🎉" * 10, "max_tokens": 8}
    options["extra_body"] = {"speculation": {"enabled": False}}  # or they would all be right, and come at once
    whole = client.completions.create(**options).choices[0].text
    with client.completions.create(**options, stream=True) as stream:
        pieces = [chunk.choices[0].text for chunk in stream]
    assert whole == "🎉🎉\ufffd"
    assert pieces == ["🎉", "🎉", "\ufffd"]


def test_a_prompt_that_ends_in_the_middle_of_a_character(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("漢字 🎉")
    cut = next(i for i in range(len(token_ids), 0, -1) if tokenizer.decode(token_ids[:i]).endswith("\ufffd"))
    answer = client.completions.create(
        **GREEDY, prompt=token_ids[:cut], max_tokens=1, logit_bias={str(token_ids[cut]): 100}
    )
    assert "\ufffd" not in answer.choices[0].text


def test_a_choice_that_ends_in_the_middle_of_a_character(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    part = next(i for i in tokenizer.encode("🎉") if len(tokenizer.token_bytes(i)) < 4)
    answer = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=2, logprobs=0, logit_bias={str(part): 100}, extra_body={"ignore_eos": True}
    )
    assert "\ufffd" in answer.choices[0].text
    shape = answer.choices[0].logprobs
    assert shape is not None
    assert all(token.startswith("bytes:\\x") for token in shape.tokens or [])


def test_tokenize_and_detokenize(server: Server, tokenizer: Tokenizer) -> None:
    text = "Hello 世界 <|im_end|>"
    answer = server.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == ENGINE["max_model_len"]
    assert answer["token_strs"] == [tokenizer.id_to_token(i) for i in answer["tokens"]]
    assert server.post("/tokenize", model="smollm2", prompt=text).json()["token_strs"] is None
    assert server.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": text}
    assert server.post("/tokenize", prompt="").json()["count"] == 0


def test_tokenize_a_chat(server: Server, tokenizer: Tokenizer, smollm2: ModelFiles) -> None:
    template = load_chat_template(smollm2)
    assert template is not None
    many = [{"role": role, "content": "Hi"} for role in ("user", "assistant")] * 40
    answer = server.post("/tokenize", messages=many).json()
    assert answer["tokens"] == tokenizer.encode(template.render(many), add_special_tokens=False)
    messages = [{"role": "user", "content": "Hi"}]
    for add in (True, False):
        answer = server.post("/tokenize", messages=messages, add_generation_prompt=add).json()
        text = template.render(messages, add_generation_prompt=add)
        assert answer["tokens"] == tokenizer.encode(text, add_special_tokens=False)
    usage = server.post("/v1/chat/completions", messages=messages, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens"] == server.post("/tokenize", messages=messages).json()["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature"),
        ("/tokenize", {"prompt": "a " * 200_000}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_bad_tokenizer_requests(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    response = server.post(path, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_models(client: openai.OpenAI) -> None:
    cards = client.models.list().data
    assert [card.id for card in cards] == ["smollm2", "default"]
    assert cards[0].object == "model"
    assert cards[0].model_extra is not None
    assert cards[0].model_extra["max_model_len"] == ENGINE["max_model_len"]
    assert client.models.retrieve("default").id == "default"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("org/other")
    assert error.value.code == "model_not_found"
