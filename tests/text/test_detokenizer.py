from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sol.sampling_params import SamplingParams
from sol.text.detokenizer import Detokenizer, TextDelta
from sol.text.tokenizer import Tokenizer

PROPERTY = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=8)
TEXT = st.text(st.sampled_from([*"ab \n.", "é", "你", "好", "😀", "👩", "\u200d", "▁"]), max_size=20)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=None, **values)


def pushed(detokenizer: Detokenizer, ids: Sequence[int], sizes: Sequence[int]) -> list[TextDelta]:
    """`ids` in steps of `sizes`, as the engine would deliver them."""
    deltas: list[TextDelta] = []
    position = 0
    while position < len(ids):
        size = sizes[len(deltas) % len(sizes)]
        deltas.append(detokenizer.push(ids[position : position + size]))
        position += size
    return deltas


def text_of(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@functools.cache
def single_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """The tokens of one byte."""
    return {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}


def byte_ids(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """One token for each byte."""
    return [single_bytes(tokenizer)[bytes([byte])] for byte in text]


def ids_to_test(tokenizer: Tokenizer, data: st.DataObject, limit: int = 20) -> list[int]:
    """A mixture: real text, tokens of few bytes (many of them no whole characters), special and unknown ids."""
    short = list(single_bytes(tokenizer).values())
    ids: list[int] = []
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(st.sampled_from(["text", "bytes", "special", "any"]))
        if kind == "text":
            ids += tokenizer.encode(data.draw(TEXT), add_special_tokens=False)
        elif kind == "bytes":
            ids += data.draw(st.lists(st.sampled_from(short), max_size=6))
        elif kind == "special":
            ids.append(data.draw(st.sampled_from(sorted(tokenizer.special_ids))))
        else:
            ids += data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 9), max_size=4))
    return ids[:limit]


@PROPERTY
@given(data=st.data())
def test_the_pieces_add_up_to_the_decoded_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    prompt, ids = ids_to_test(tokenizer, data), ids_to_test(tokenizer, data)
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(tokenizer, params(skip_special_tokens=skip), prompt)
    deltas = pushed(detokenizer, ids, data.draw(SIZES))
    whole = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    expected = whole[len(tokenizer.decode(prompt, skip_special_tokens=skip)) :]
    assert text_of([*deltas, detokenizer.finish()]) == expected
    assert detokenizer.num_tokens == len(ids) == sum(delta.num_tokens for delta in deltas)


@PROPERTY
@given(data=st.data())
def test_no_piece_is_ever_taken_back(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Whatever comes next, what has been emitted is a prefix: no U+FFFD that a later byte would have avoided."""
    ids = tokenizer.encode(data.draw(TEXT), add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, params(skip_special_tokens=False), [])
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    emitted = ""
    for token_id in ids:
        emitted += detokenizer.push([token_id]).text
        assert whole.startswith(emitted)
        assert "\ufffd" not in emitted
    assert emitted == whole
    assert detokenizer.finish() == TextDelta()


@PROPERTY
@given(data=st.data())
def test_token_offsets_are_where_each_tokens_text_begins(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = tokenizer.encode(data.draw(TEXT), add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, params(skip_special_tokens=False, stop=["\x00"]), [])
    offsets = [offset for delta in pushed(detokenizer, ids, data.draw(SIZES)) for offset in delta.token_offsets]
    complete = [tokenizer.decode(ids[:index], skip_special_tokens=False) for index in range(len(ids))]
    assert offsets == [len(text.rstrip("\ufffd")) for text in complete]


def expected_stop(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], min_tokens: int
) -> tuple[str, int, str | None]:
    """Text before the stop string, tokens up to it, and itself; found by trying every end after every token."""
    detokenizer = Detokenizer(tokenizer, params(), [])
    text = ""
    for count, token_id in enumerate(ids, start=1):
        before = len(text)
        text += detokenizer.push([token_id]).text
        for end in range(before + 1, len(text) + 1) if count > min_tokens else ():
            found = [stop for stop in stops if text[:end].endswith(stop)]
            if found:
                stop = max(found, key=len)
                return text[: end - len(stop)], count, stop
    return text + detokenizer.finish().text, len(ids), None


@PROPERTY
@given(data=st.data())
def test_stop_strings(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = ids_to_test(tokenizer, data, limit=40)
    text = tokenizer.decode(ids)
    parts = [text[i : i + n] for i in range(len(text)) for n in (1, 2, 3, 7) if i + n <= len(text)]
    pool = st.one_of(st.sampled_from(parts), TEXT.filter(bool)) if parts else TEXT.filter(bool)
    stops = data.draw(st.lists(pool, min_size=1, max_size=3))
    min_tokens = data.draw(st.integers(0, 6))
    include = data.draw(st.booleans())
    values = params(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    detokenizer = Detokenizer(tokenizer, values, [])
    deltas = pushed(detokenizer, ids, data.draw(SIZES))
    before, num_tokens, stop = expected_stop(tokenizer, ids, stops, min_tokens)
    found = [delta.stop for delta in deltas if delta.stop is not None]
    assert found == ([] if stop is None else [stop])
    assert text_of([*deltas, detokenizer.finish()]) == (before + stop if stop is not None and include else before)
    assert sum(delta.num_tokens for delta in deltas) == num_tokens == detokenizer.num_tokens
    assert [len(delta.token_offsets) for delta in deltas] == [delta.num_tokens for delta in deltas]


def test_a_character_appears_with_its_last_byte(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, params(), tokenizer.encode("x"))
    steps = [detokenizer.push([i]).text for i in byte_ids(tokenizer, "é😀".encode())]
    assert steps == ["", "é", "", "", "", "😀"]


def test_bytes_that_cannot_be_text_appear_as_replacement_characters_at_once(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, params(), tokenizer.encode("x"))
    steps = [detokenizer.push([i]).text for i in byte_ids(tokenizer, b"\xe4\xbda\x80")]
    assert steps == ["", "", "\ufffda", "\ufffd"]


def test_a_character_cut_off_by_the_end_becomes_one_replacement_character(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, params(), tokenizer.encode("x"))
    assert text_of(pushed(detokenizer, byte_ids(tokenizer, "a😀".encode()[:-1]), [1])) == "a"
    assert detokenizer.finish().text == "\ufffd"
    assert detokenizer.finish() == TextDelta()


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character_does_not_leak(tokenizer: Tokenizer, cut: int) -> None:
    emoji = byte_ids(tokenizer, "😀".encode())
    prompt = tokenizer.encode("The prompt ") + emoji[:cut]
    detokenizer = Detokenizer(tokenizer, params(), prompt)
    output = [*emoji[cut:], *byte_ids(tokenizer, b"ok")]
    assert text_of([*pushed(detokenizer, output, [1]), detokenizer.finish()]) == "ok"
    detokenizer = Detokenizer(tokenizer, params(), prompt)  # the model does not complete the character
    assert text_of([*pushed(detokenizer, byte_ids(tokenizer, b"no"), [1]), detokenizer.finish()]) == "no"
    assert Detokenizer(tokenizer, params(), prompt).finish().text == ""


def test_the_space_of_the_first_sentencepiece_word(sentencepiece: Tokenizer) -> None:
    (word,) = [i for i in range(sentencepiece.vocab_size) if sentencepiece.id_to_token(i) == "▁the"]
    bos = sentencepiece.bos_token_id
    assert bos is not None
    prompt = sentencepiece.encode("say")
    assert Detokenizer(sentencepiece, params(), prompt).push([word]).text == " the"
    assert Detokenizer(sentencepiece, params(), []).push([word, word]).text == "the the"
    assert Detokenizer(sentencepiece, params(), [bos]).push([bos, word, word]).text == "the the"
    assert Detokenizer(sentencepiece, params(skip_special_tokens=False), [bos]).push([word]).text == " the"


def test_text_is_withheld_only_while_it_may_be_a_stop_string(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, params(stop=["</end>"]), [])
    steps = [detokenizer.push([i]).text for i in byte_ids(byte_level, b"a</e</en.</end>")]
    assert steps == ["a", "", "", "", "</e", "", "", "", "</en.", "", "", "", "", "", ""]
    assert detokenizer.finished
    assert detokenizer.push(byte_level.encode("more")) == TextDelta()
    assert detokenizer.finish() == TextDelta()


def test_what_was_withheld_comes_with_the_end(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, params(stop=["</end>"]), [])
    assert detokenizer.push(byte_level.encode("a</en")).text == "a"
    assert detokenizer.finish().text == "</en"


def test_tokens_after_a_stop_string_do_not_count(byte_level: Tokenizer) -> None:
    ids = byte_ids(byte_level, b"abcdef")
    delta = Detokenizer(byte_level, params(stop=["cd"]), []).push(ids)
    assert delta == TextDelta(text="ab", num_tokens=4, token_offsets=[0, 1, 2, 3], stop="cd")
    delta = Detokenizer(byte_level, params(stop=["cd"], include_stop_str_in_output=True), []).push(ids)
    assert (delta.text, delta.num_tokens) == ("abcd", 4)


def test_a_stop_string_within_min_tokens_does_not_count(byte_level: Tokenizer) -> None:
    ids = byte_ids(byte_level, b"x.y.z")
    delta = Detokenizer(byte_level, params(stop=["."], min_tokens=2), []).push(ids)
    assert (delta.text, delta.num_tokens) == ("x.y", 4)
    delta = Detokenizer(byte_level, params(stop=["y."], min_tokens=3), []).push(ids)  # begins before, ends after
    assert (delta.text, delta.num_tokens) == ("x.", 4)


def test_the_text_of_the_token_that_ended_the_request_is_left_out(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one two")
    end = byte_level.eos_token_ids[0]
    for skip in (True, False):
        detokenizer = Detokenizer(byte_level, params(skip_special_tokens=skip), [])
        delta = detokenizer.push([*ids, end], ended_by_token=True)
        assert (delta.text, delta.num_tokens) == ("one two", 3)
    delta = Detokenizer(byte_level, params(stop_token_ids=ids[-1:]), []).push(ids, ended_by_token=True)
    assert (delta.text, delta.num_tokens) == ("one", 2)
    included = params(include_stop_str_in_output=True, skip_special_tokens=False)
    delta = Detokenizer(byte_level, included, []).push([*ids, end], ended_by_token=True)
    assert delta.text == "one two<|im_end|>"


def test_special_tokens_are_shown_on_request(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|im_end|>b")
    assert Detokenizer(byte_level, params(), []).push(ids).text == "ab"
    assert Detokenizer(byte_level, params(skip_special_tokens=False), []).push(ids).text == "a<|im_end|>b"
