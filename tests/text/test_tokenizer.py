from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from data.record_tokenizer_fixture import sentencepiece_metadata
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_files import files_in
from tokenizers import decoders, models, pre_tokenizers

from sol.errors import ModelError, RequestError, TokenizerError
from sol.models.source import ModelFiles
from sol.text.gguf_tokenizer import build_gguf_tokenizer
from sol.text.tokenizer import Tokenizer

Directory = tuple[ModelFiles, Any]


@pytest.fixture(scope="module", params=["byte level", "sentencepiece"])
def directory(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    smollm2_metadata: dict[str, Any],
    llama_cpp: dict[str, Any],
) -> Directory:
    """A Hugging Face directory, and what transformers makes of it."""
    from transformers import AutoTokenizer

    if request.param == "byte level":
        parts = build_gguf_tokenizer(smollm2_metadata, "test.gguf")
    else:
        parts = build_gguf_tokenizer(sentencepiece_metadata(llama_cpp["sentencepiece"]["vocabulary"]), "test.gguf")
    path = tmp_path_factory.mktemp("hugging_face")
    parts.backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(config | parts.special_tokens))
    return files_in(path), AutoTokenizer.from_pretrained(path)


def test_ids_and_text_equal_transformers(directory: Directory, llama_cpp: dict[str, Any]) -> None:
    files, theirs = directory
    ours = Tokenizer.from_files(files)
    for string in llama_cpp["strings"]:
        ids = ours.encode(string)
        assert ids == theirs.encode(string)
        assert ours.encode(string, add_special_tokens=False) == theirs.encode(string, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_special_tokens_equal_transformers(directory: Directory) -> None:
    files, theirs = directory
    ours = Tokenizer.from_files(files)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert set(theirs.all_special_ids) <= ours.special_ids
    assert ours.vocab_size == len(theirs)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 49151), max_size=12), skip=st.booleans())
def test_any_ids_decode_as_the_tokenizers_library_does(
    byte_level: Tokenizer, backend: tokenizers.Tokenizer, ids: list[int], skip: bool
) -> None:
    """Invalid UTF-8 included."""
    assert byte_level.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


@pytest.fixture(scope="module")
def backend(smollm2_metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    return build_gguf_tokenizer(smollm2_metadata, "test.gguf").backend


def test_the_bytes_of_the_tokens_add_up_to_the_text(byte_level: Tokenizer, llama_cpp: dict[str, Any]) -> None:
    for string, ids in zip(llama_cpp["strings"][:200], llama_cpp["ids"], strict=False):
        joined = b"".join(byte_level.token_bytes(i) for i in ids)
        assert joined.decode() == byte_level.decode(ids, skip_special_tokens=False)
        assert joined == string.encode() or any(ord(c) < 0x20 for c in string)


def test_tokens_as_the_vocabulary_writes_them(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("Hello world")
    assert [byte_level.id_to_token(i) for i in ids] == ["Hello", "Ġworld"]
    assert [byte_level.token_bytes(i) for i in ids] == [b"Hello", b" world"]
    assert byte_level.id_to_token(-1) == byte_level.id_to_token(49152) == byte_level.id_to_token(2**40) == ""
    assert byte_level.vocab_size == 49152


def test_half_a_surrogate_pair_is_the_requests_mistake(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"prompt: character 2 is '\\ud83d', half of a surrogate pair") as caught:
        byte_level.encode("a \ud83d b")
    assert caught.value.param == "prompt"


def words(directory: Path, **options: Any) -> None:
    """A tokenizer.json of whole words, like the one that benchmarks use."""
    backend = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(20)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    for key, value in options.items():
        setattr(backend, key, value)
    backend.save(str(directory / "tokenizer.json"))


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def test_a_named_token_is_special_though_the_vocabulary_holds_it_as_an_ordinary_one(tmp_path: Path) -> None:
    words(tmp_path)
    write(
        tmp_path / "tokenizer_config.json", {"bos_token": "w18", "eos_token": {"content": "w19"}, "pad_token": "none"}
    )
    tokenizer = Tokenizer.from_files(files_in(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (18, (19,))
    assert tokenizer.special_ids == {18, 19}
    ids = tokenizer.encode("w18 w1 w2 w19")
    assert ids == [18, 1, 2, 19]
    assert tokenizer.decode(ids) == "w1 w2"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "w18 w1 w2 w19"


def test_where_the_named_tokens_come_from(tmp_path: Path) -> None:
    words(tmp_path)
    write(tmp_path / "special_tokens_map.json", {"bos_token": "w1", "eos_token": "w2"})
    assert Tokenizer.from_files(files_in(tmp_path)).eos_token_ids == (2,)
    write(tmp_path / "tokenizer_config.json", {"bos_token": None, "eos_token": "w3"})
    tokenizer = Tokenizer.from_files(files_in(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (3,))
    write(tmp_path / "generation_config.json", {"eos_token_id": [4, 5]})
    assert Tokenizer.from_files(files_in(tmp_path)).eos_token_ids == (4, 5)
    write(tmp_path / "generation_config.json", {"eos_token_id": 6})
    assert Tokenizer.from_files(files_in(tmp_path)).eos_token_ids == (6,)
    write(tmp_path / "generation_config.json", {"temperature": 0.6})
    assert Tokenizer.from_files(files_in(tmp_path)).eos_token_ids == (3,)


def test_without_named_tokens(tmp_path: Path) -> None:
    words(tmp_path)
    tokenizer = Tokenizer.from_files(files_in(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_ids) == (None, (), frozenset())


def test_truncation_and_padding_of_the_file_are_not_obeyed(tmp_path: Path) -> None:
    """They are for training batches, and would shorten a prompt in silence."""
    words(tmp_path)
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    saved.enable_truncation(2)
    saved.enable_padding(length=8)
    saved.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_files(files_in(tmp_path)).encode("w1 w2 w3") == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokenizer_config.json", {"eos_token": "none"}, "eos_token is 'none', which is not in the vocabulary of 20"),
        ("tokenizer_config.json", {"bos_token": 7}, "bos_token must be a string or an added token, not 7"),
        ("tokenizer_config.json", {"bos_token": {"content": 7}}, "bos_token must be a string or an added token"),
        ("tokenizer_config.json", [], "tokenizer_config.json must hold a JSON object"),
        ("generation_config.json", {"eos_token_id": 20}, "eos_token_id must be ids in the vocabulary, not 20"),
        ("generation_config.json", {"eos_token_id": ["w1"]}, "eos_token_id must be ids in the vocabulary"),
        ("tokenizer.json", {"model": {}}, "tokenizer.json cannot be read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, value: Any, message: str) -> None:
    words(tmp_path)
    write(tmp_path / name, value)
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_files(files_in(tmp_path))


def test_an_unsupported_decoder_is_refused(tmp_path: Path) -> None:
    words(tmp_path, decoder=decoders.CTC())
    with pytest.raises(TokenizerError, match="CTC"):
        Tokenizer.from_files(files_in(tmp_path))


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json; with transformers"):
        Tokenizer.from_files(files_in(tmp_path))


def test_a_long_text_has_the_ids_of_its_parts(byte_level: Tokenizer) -> None:
    # Long texts take another way through `tokenizers`. A line break followed by a letter ends a word.
    part = "Sol answers 42 questions: 你好, naïve café… 🙂\n"
    assert byte_level.encode(part * 200) == byte_level.encode(part) * 200
