"""Prompts and lengths: where they come from, and that a seed decides them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sol.bench.data import Conversation, Listed, Turn, built_in
from sol.bench.files import read_conversations, read_trace
from sol.bench.lengths import Lengths
from sol.bench.synthetic import Synthetic, TraceData, WordLengths
from sol.errors import ConfigError


def test_the_built_in_prompts_are_eighty_in_two_languages_and_four_tasks() -> None:
    keys = {built_in().conversation(i).key for i in range(80)}
    assert len(keys) == 80
    for task in ("chat", "code", "extraction", "summary"):
        for language in ("en", "zh"):
            data = built_in(tasks=[task], languages=[language])
            turns = [data.conversation(i).turns[0] for i in range(10)]
            assert len({str(turn.prompt) for turn in turns}) == 10
            chinese = [any("\u4e00" <= letter <= "\u9fff" for letter in str(turn.prompt)) for turn in turns]
            assert all(chinese) if language == "zh" else not any(chinese)
            assert all(turn.max_tokens is not None and turn.max_tokens >= 100 for turn in turns)
    with pytest.raises(ConfigError, match="tasks must be some of chat, code, extraction, summary, not poem"):
        built_in(tasks=["poem"])


def test_each_prompt_is_used_once_before_any_is_used_again() -> None:
    data = Listed([Conversation(key=str(i), turns=[Turn(prompt="p", max_tokens=1)]) for i in range(7)], seed=3)
    keys = [data.conversation(i).key for i in range(21)]
    assert [sorted(keys[lap * 7 : lap * 7 + 7]) for lap in range(3)] == [list("0123456")] * 3
    assert keys[:7] != keys[7:14]
    assert [data.conversation(i).key for i in (20, 3, 9, 0)] == [keys[20], keys[3], keys[9], keys[0]]


@pytest.mark.parametrize(
    ("text", "mean"), [("128", 128), ("uniform:10:20", 15), ("normal:100:10", 100), ("lognormal:100:0.1", 100.5)]
)
def test_lengths_have_their_distribution(text: str, mean: float) -> None:
    lengths, rng = Lengths.parse(text, "x"), np.random.default_rng(0)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.02)
    assert lengths.text == text
    if text.startswith("uniform"):
        assert (min(drawn), max(drawn)) == (10, 20)


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "1.5", "uniform:9", "uniform:9:3", "normal:nan:1", "zipf:1:2", "normal:5:-1", "1e99"]
)
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="input_tokens must be like 128, uniform:64:256"):
        Lengths.parse(text, "input_tokens")


def test_a_normal_length_never_vanishes() -> None:
    rng = np.random.default_rng(0)
    assert min(Lengths.parse("normal:2:50", "x").draw(rng) for _ in range(200)) == 1


def test_synthetic_prompts_have_their_length_and_differ() -> None:
    lengths = WordLengths(fixed=8.0, per_word=1.25)
    data = Synthetic(lengths, input_tokens=Lengths.parse("108", "x"), output_tokens=Lengths.parse("5", "x"), seed=4)
    prompts = [str(data.conversation(i).turns[0].prompt) for i in range(50)]
    assert {len(prompt.split()) for prompt in prompts} == {80}
    assert len({" ".join(prompt.split()[:4]) for prompt in prompts}) == 50  # nothing that a prefix cache could find
    assert prompts[7] == data.conversation(7).turns[0].prompt


def test_synthetic_prefixes_are_shared_within_a_group() -> None:
    data = Synthetic(
        WordLengths(), input_tokens=Lengths.parse("100", "x"), output_tokens=Lengths.parse("5", "x"), prefix_tokens=60,
        num_prefixes=3,
    )  # fmt: skip
    prompts = [str(data.conversation(i).turns[0].prompt).split() for i in range(60)]
    assert {len(prompt) for prompt in prompts} == {100}
    assert len({tuple(prompt[:60]) for prompt in prompts}) == 3
    assert len({tuple(prompt) for prompt in prompts}) == 60


def test_synthetic_conversations_have_turns() -> None:
    data = Synthetic(
        WordLengths(), input_tokens=Lengths.parse("20", "x"), output_tokens=Lengths.parse("5", "x"),
        turns=Lengths.parse("uniform:2:4", "x"), turn_delay=1.5,
    )  # fmt: skip
    conversations = [data.conversation(i).turns for i in range(40)]
    assert {len(turns) for turns in conversations} == {2, 3, 4}
    assert all([turn.delay for turn in turns] == [0.0] + [1.5] * (len(turns) - 1) for turns in conversations)


def test_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    said = [
        {"from": "human", "value": "one"}, {"from": "gpt", "value": "answer"}, {"from": "human", "value": "two"}
    ]  # fmt: skip
    begun_by_nobody = {"id": "b", "conversations": [{"from": "gpt", "value": "hello"}]}
    path.write_text(json.dumps([{"id": "a", "conversations": said}, begun_by_nobody]))
    (single,) = read_conversations(path, 64, multi_turn=False)
    assert (single.key, len(single.turns), single.turns[0].max_tokens) == ("a", 1, 64)
    (whole,) = read_conversations(path, 64, multi_turn=True)
    assert [turn.messages() for turn in whole.turns] == [
        [{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]
    ]  # fmt: skip


def test_lines_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    lines = ['"plain"', '{"prompt": "p", "max_tokens": 9, "id": "x", "body": {"top_p": 0.5}}', "",
             '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}',
             '{"turns": ["first", "second"]}']  # fmt: skip
    path.write_text("\n".join(lines))
    plain, full, chat, turns = read_conversations(path, 64, multi_turn=True)
    assert plain.turns[0].prompt == "plain"
    assert (full.key, full.turns[0].max_tokens, full.turns[0].body) == ("x", 9, {"top_p": 0.5})
    assert len(chat.turns[0].messages()) == 2
    assert [turn.prompt for turn in turns.turns] == ["first", "second"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no prompts"),
        ("{", "line 1 is not JSON"),
        ("3", "line 1 must be a text or"),
        ('{"prompt": "a", "messages": []}', "it has messages, prompt"),
        ('{"prompt": "a", "temperature": 1}', "it has prompt, temperature"),
        ('{"prompt": ""}', "a prompt must be a text that is not empty"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens must be a whole number from 1, not True"),
        ("[{}]", 'has no list of "conversations"'),
        ('[{"conversations": [{"from": "alien", "value": "x"}]}]', "not 'alien'"),
        ("[]", "has no conversation in which a person says something"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "f"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_conversations(path, 64, multi_turn=False)
    assert says in caught.value.message


def test_mooncakes_traces_share_prefixes_as_they_did(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    lines = [(3000, 1500, 20, [1, 2, 9]), (1000, 1100, 10, [1, 2, 3]), (2000, 400, 5, [7])]
    path.write_text("\n".join(
        json.dumps({"timestamp": t, "input_length": i, "output_length": o, "hash_ids": h}) for t, i, o, h in lines
    ))  # fmt: skip
    entries = read_trace(path)
    assert [entry.timestamp for entry in entries] == [0.0, 1.0, 2.0]
    data = TraceData(entries, WordLengths())
    first, second, third = (str(data.conversation(i).turns[0].prompt).split() for i in range(3))
    assert (len(first), len(second), len(third)) == (1100, 400, 1500)
    assert first[:1024] == third[:1024]
    assert first[1024:] != third[1024:1100]
    assert [data.conversation(i).turns[0].max_tokens for i in range(3)] == [10, 5, 20]


def test_burstgpts_failures_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,30,0,30,API log\n117,ChatGPT,1087,230,1317,API log\n"
    )
    entries = read_trace(path)
    assert [(e.timestamp, e.input_tokens, e.output_tokens) for e in entries] == [(0.0, 472, 18), (112.0, 1087, 230)]
    data = TraceData(entries, WordLengths())
    assert len(str(data.conversation(1).turns[0].prompt).split()) == 1087
    assert data.conversation(3).key == data.conversation(1).key


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is missing"),
        ("a,b\n1,2\n", "timestamp, request tokens, response tokens is missing"),
        ("Timestamp,Request tokens,Response tokens\nx,1,1\n", "line 2"),
        ('{"timestamp": 1}', "line 1 is no line of Mooncake's form"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 3}', "out of range"),
    ],
)
def test_traces_that_are_none(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "t"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert says in caught.value.message
