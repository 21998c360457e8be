from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from data.record_tokenizer_fixture import EVERY, PRE_TOKENIZERS, byte_level_metadata, sentencepiece_metadata
from text_files import tokenizer_of

from sol.errors import ModelError, TokenizerError
from sol.text.gguf_tokenizer import PRE_TOKENIZERS as SUPPORTED
from sol.text.gguf_tokenizer import build_gguf_tokenizer


def test_ids_equal_llama_cpps(smollm2_metadata: dict[str, Any], llama_cpp: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(smollm2_metadata)
    strings = llama_cpp["strings"]
    assert len(set(strings)) == 1000
    differ = [s for s, ids in zip(strings, llama_cpp["ids"], strict=True) if tokenizer.encode(s) != ids]
    assert differ == []


def test_text_of_the_ids_equals_llama_cpps(smollm2_metadata: dict[str, Any], llama_cpp: dict[str, Any]) -> None:
    """Nearly always the string itself. SmolLM2's vocabulary lacks a few control characters: both drop them."""
    tokenizer = tokenizer_of(smollm2_metadata)
    for index, (string, ids) in enumerate(zip(llama_cpp["strings"], llama_cpp["ids"], strict=True)):
        text = llama_cpp["texts_that_differ"].get(str(index), string)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(llama_cpp["texts_that_differ"]) < 20


def test_special_token_text_taken_as_plain_text(smollm2_metadata: dict[str, Any], llama_cpp: dict[str, Any]) -> None:
    """Sol recognises special tokens in text, as Hugging Face does; the vocabulary below is the same without."""
    backend = build_gguf_tokenizer(smollm2_metadata, "test.gguf").backend
    backend.encode_special_tokens = True
    differing = llama_cpp["ids_without_special"]
    assert len(differing) > 15
    for index, (string, ids) in enumerate(zip(llama_cpp["strings"], llama_cpp["ids"], strict=True)):
        assert backend.encode(string).ids == differing.get(str(index), ids)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_each_pre_tokenizer_cuts_where_llama_cpp_does(pre: str, llama_cpp: dict[str, Any]) -> None:
    record = llama_cpp["byte_level"]
    tokenizer = tokenizer_of(byte_level_metadata(record["vocabulary"], pre))
    compared = 0
    for index, string in enumerate(llama_cpp["strings"][::EVERY]):
        # llama.cpp leaves out the NFC normalisation of Qwen2 and Command R.
        if not SUPPORTED[pre].nfc or unicodedata.is_normalized("NFC", string):
            assert tokenizer.encode(string) == record["ids_that_differ"][pre].get(str(index), record["ids"][index])
            compared += 1
    assert compared > 200


def test_every_pre_tokenizer_is_recorded() -> None:
    aliases = {"llama-v3", "llama3"}
    assert set(PRE_TOKENIZERS) == set(SUPPORTED) - aliases
    assert all(SUPPORTED[name] is SUPPORTED["llama-bpe"] for name in aliases)


def test_sentencepiece_ids_equal_llama_cpps(llama_cpp: dict[str, Any]) -> None:
    record = llama_cpp["sentencepiece"]
    tokenizer = tokenizer_of(sentencepiece_metadata(record["vocabulary"]))
    strings = llama_cpp["strings"][::EVERY]
    differ = [s for s, ids in zip(strings, record["ids"], strict=True) if tokenizer.encode(s) != ids]
    assert differ == []
    assert any("[INST]" in s or "<s>" in s for s in strings)


def test_sentencepiece_text_survives_the_round_trip(llama_cpp: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(sentencepiece_metadata(llama_cpp["sentencepiece"]["vocabulary"]))
    for string in llama_cpp["strings"]:
        # A text after a special token gets a space of its own, and U+2581 is the space.
        if not any(token in string for token in ("<s>", "</s>", "<unk>", "[INST]", "▁")):
            assert tokenizer.decode(tokenizer.encode(string)) == string


def test_nfc_models_see_composed_characters(llama_cpp: dict[str, Any]) -> None:
    vocabulary = llama_cpp["byte_level"]["vocabulary"]
    for pre, normalised in (("qwen2", True), ("command-r", True), ("gpt-2", False)):
        tokenizer = tokenizer_of(byte_level_metadata(vocabulary, pre))
        assert (tokenizer.encode("cafe\u0301") == tokenizer.encode("caf\u00e9")) is normalised


def test_qwen2_equals_transformers_own_class(llama_cpp: dict[str, Any]) -> None:
    from transformers import Qwen2Tokenizer

    vocabulary = llama_cpp["byte_level"]["vocabulary"]
    ids = {token: index for index, token in enumerate(vocabulary["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in vocabulary["merges"]]
    theirs = Qwen2Tokenizer(
        vocab=ids, merges=merges, unk_token=None, eos_token="<|im_end|>", pad_token=None, bos_token="<|im_start|>"
    )
    ours = tokenizer_of(byte_level_metadata(vocabulary, "qwen2"))
    for string in llama_cpp["strings"]:
        assert ours.encode(string) == theirs.encode(string)


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("gpt-2", False), ("smollm", False)])
def test_whether_prompts_get_a_bos(pre: str, adds: bool, llama_cpp: dict[str, Any]) -> None:
    metadata = byte_level_metadata(llama_cpp["byte_level"]["vocabulary"], pre)
    bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    plain = tokenizer_of(metadata).encode("x", add_special_tokens=False)
    assert tokenizer_of(metadata).encode("x") == ([bos, *plain] if adds else plain)
    for flag in (True, False):
        said = metadata | {"tokenizer.ggml.add_bos_token": flag, "tokenizer.ggml.add_eos_token": flag}
        assert tokenizer_of(said).encode("x") == ([bos, *plain, eos] if flag else plain)
        assert tokenizer_of(said).encode("") == ([bos, eos] if flag else [])


def test_end_tokens_are_all_that_the_file_names(llama_cpp: dict[str, Any]) -> None:
    metadata = byte_level_metadata(llama_cpp["byte_level"]["vocabulary"], "llama-bpe")
    eos = metadata["tokenizer.ggml.eos_token_id"]
    assert tokenizer_of(metadata).eos_token_ids == (eos,)
    named = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": eos}
    assert tokenizer_of(metadata | named).eos_token_ids == (eos, 5)


def test_without_a_space_prefix(llama_cpp: dict[str, Any]) -> None:
    metadata = sentencepiece_metadata(llama_cpp["sentencepiece"]["vocabulary"])
    tokenizer = tokenizer_of(metadata | {"tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.id_to_token(tokenizer.encode("the", add_special_tokens=False)[0]) == "the"
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_tokens_of_the_users_are_found_in_text_but_are_not_special(llama_cpp: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(sentencepiece_metadata(llama_cpp["sentencepiece"]["vocabulary"]))
    ids = tokenizer.encode("a [INST]", add_special_tokens=False)
    assert tokenizer.id_to_token(ids[-1]) == "[INST]"
    assert tokenizer.decode(ids) == "a [INST]"
    assert tokenizer.special_ids == {0, 1, 2}


def test_token_types_are_optional(llama_cpp: dict[str, Any]) -> None:
    metadata = byte_level_metadata(llama_cpp["byte_level"]["vocabulary"], "gpt-2")
    del metadata["tokenizer.ggml.token_type"]
    assert tokenizer_of(metadata).decode(tokenizer_of(metadata).encode("it is")) == "it is"


BYTE_LEVEL_DEFECTS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown pre-tokenizer": ({"pre": "martian"}, r"tokenizer.ggml.pre is 'martian'.*command-r, gpt-2, llama-bpe"),
    "the one that means nothing": ({"pre": "default"}, "tokenizer.ggml.pre is 'default', which is not supported"),
    "no pre-tokenizer": ({"pre": None}, "tokenizer.ggml.pre is missing"),
    "ill-typed pre-tokenizer": ({"pre": 3}, "tokenizer.ggml.pre is 3"),
    "unknown family": ({"model": "t5"}, "tokenizer.ggml.model 't5' is not supported; supported: gpt2, llama"),
    "no family": ({"model": None}, "there is no tokenizer in it"),
    "no tokens": ({"tokens": None}, "tokenizer.ggml.tokens must be an array of str values; it is missing"),
    "ill-typed tokens": ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of str"),
    "a token twice": ({"tokens": ["a", "b", "a"], "token_type": None}, "holds 'a' more than once"),
    "too few types": ({"token_type": [1]}, "1 entries in tokenizer.ggml.token_type"),
    "no merges": ({"merges": None}, "tokenizer.ggml.merges must be an array of str values; it is missing"),
    "a merge of three": ({"merges": ["a b c"]}, "holds 'a b c', which is not two tokens"),
    "a merge of strangers": ({"merges": ["qqq qqq"]}, "do not fit the vocabulary"),
    "space prefix": ({"add_space_prefix": True}, "add_space_prefix is true, which the family gpt2 does not have"),
    "separator": ({"add_sep_token": True}, "add_sep_token is true, which is not supported"),
    "no bos to add": ({"add_bos_token": True, "bos_token_id": None}, "there is no tokenizer.ggml.bos_token_id"),
    "bos outside": ({"bos_token_id": 10**6}, "tokenizer.ggml.bos_token_id must be token ids from 0 to"),
    "ill-typed flag": ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token must be true or false"),
}
SENTENCEPIECE_DEFECTS: dict[str, tuple[dict[str, Any], str]] = {
    "no scores": ({"scores": None}, "tokenizer.ggml.scores must be an array of float values; it is missing"),
    "too few scores": ({"scores": [1.0]}, "1 entries in tokenizer.ggml.scores"),
    "extra whitespace": ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is true"),
}


def changed(metadata: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in merged.items() if value is not None}


@pytest.mark.parametrize("defect", BYTE_LEVEL_DEFECTS)
def test_what_is_wrong_is_named(defect: str, llama_cpp: dict[str, Any]) -> None:
    changes, message = BYTE_LEVEL_DEFECTS[defect]
    metadata = byte_level_metadata(llama_cpp["byte_level"]["vocabulary"], "gpt-2")
    with pytest.raises(ModelError, match=message) as caught:
        build_gguf_tokenizer(changed(metadata, changes), "test.gguf")
    assert caught.value.message.startswith("test.gguf")


@pytest.mark.parametrize("defect", SENTENCEPIECE_DEFECTS)
def test_what_is_wrong_with_sentencepiece_is_named(defect: str, llama_cpp: dict[str, Any]) -> None:
    changes, message = SENTENCEPIECE_DEFECTS[defect]
    metadata = sentencepiece_metadata(llama_cpp["sentencepiece"]["vocabulary"])
    with pytest.raises(TokenizerError, match=message):
        build_gguf_tokenizer(changed(metadata, changes), "test.gguf")


def test_an_unknown_token_is_found_by_its_type(llama_cpp: dict[str, Any]) -> None:
    metadata = sentencepiece_metadata(llama_cpp["sentencepiece"]["vocabulary"])
    tokenizer = tokenizer_of(changed(metadata, {"unknown_token_id": None}))
    assert tokenizer.encode("the") == tokenizer_of(metadata).encode("the")
