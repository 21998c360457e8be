"""Where models come from: directories, files and the hub; and what is said when they do not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, running_hub
from tiny_models import TinyLlama, make_llama, write_gguf

from sol.errors import (
    CheckpointError,
    ConfigError,
    DownloadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
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


# --- the hub


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with running_hub() as server:
        description = {
            "config.json": json.dumps(CONFIG).encode(),
            "generation_config.json": b"{}",
            "tokenizer.json": b"{ }",
            "tokenizer_config.json": b"{  }",
            "special_tokens_map.json": b"{   }",
            "chat_template.jinja": b"{    }",
        }
        unwanted = ["README.md", "pytorch_model.bin", "original/config.json", "original/a.safetensors"]
        unwanted += ["consolidated.00.safetensors"]
        weights = {"model.safetensors": b"weights"}
        server.repositories = {
            "org/whole": description | weights | dict.fromkeys(unwanted, b"unwanted"),
            "org/mistral": {"config.json": json.dumps(CONFIG | {"architectures": ["Other"]}).encode()} | weights,
            "org/unfinished": description,
            "org/gguf": {"README.md": b"", "a.gguf": b""},
        }
        server.refusals = {
            "org/gated": (403, "GatedRepo"),
            "org/forbidden": (403, "Forbidden"),
            "org/broken": (500, "Broken"),
        }
        yield server


def redirect(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """huggingface_hub reads its environment once, at import, so what it read is replaced."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub_home(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> Path:
    """huggingface_hub talks to the hub on localhost and keeps its cache here."""
    from huggingface_hub import constants

    redirect(monkeypatch, hub.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    hub.fetched.clear()
    return tmp_path / "hub"


UNREACHABLE = "http://127.0.0.1:9"
DESCRIPTION = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
]


def test_hub(hub: FakeHub, hub_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dummy = resolve("org/whole", load_format="dummy", progress=False)
    assert dummy.safetensors == ()
    assert sorted(hub.fetched) == sorted(f"org/whole/{name}" for name in DESCRIPTION)
    files = resolve("org/whole", progress=False)
    assert resolve("org/whole", load_format="safetensors", progress=False) == files
    assert [path.name for path in files.safetensors] == ["model.safetensors"]
    found = [files.config, files.generation_config, files.tokenizer_json, files.tokenizer_config]
    found += [files.chat_template, files.special_tokens_map]
    assert [path.name for path in found if path] == DESCRIPTION
    assert (files.name, files.load_format) == ("org/whole", "safetensors")
    assert files.root.is_relative_to(hub_home)
    # Each once, and nothing that is not needed.
    assert sorted(hub.fetched) == sorted(f"org/whole/{name}" for name in [*DESCRIPTION, "model.safetensors"])
    redirect(monkeypatch, UNREACHABLE)
    assert resolve("org/whole", progress=False) == files


@pytest.mark.parametrize(
    ("model", "error", "parts"),
    [
        ("org/gated", DownloadError, ["gated", "accept its licence at https://huggingface.co/org/gated", "HF_TOKEN"]),
        ("org/forbidden", DownloadError, ["refuses model 'org/forbidden' (HTTP 403)", "HF_TOKEN"]),
        ("org/broken", DownloadError, ["the hub answers HTTP 500; try again later"]),
        ("org/absent", ModelNotFoundError, ["'org/absent' is neither a path here nor a repository", "HF_TOKEN"]),
        ("org/mistral", UnsupportedModelError, ["config.json: architectures is ['Other']"]),
        ("org/unfinished", DownloadError, ["'org/unfinished' is incomplete", "has no weights"]),
        ("org/gguf", ModelNotFoundError, ["has no config.json on the hub", "download one and give its path"]),
        ("org/bad--name", ModelNotFoundError, ["'org/bad--name' is neither a path nor a hub id"]),
    ],
)
def test_hub_refusals(hub: FakeHub, hub_home: Path, model: str, error: type[Exception], parts: list[str]) -> None:
    with pytest.raises(error) as caught:
        resolve(model, progress=False)
    for part in parts:
        assert part in str(caught.value)
    assert not any(name.endswith(".safetensors") for name in hub.fetched)  # refused before weights are fetched


def test_hub_out_of_reach(hub_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    redirect(monkeypatch, UNREACHABLE)
    with pytest.raises(DownloadError, match="cannot be reached: connect this machine"):
        resolve("org/model")


def test_hub_that_fails_in_between(hub: FakeHub, hub_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: object, **__: object) -> None:
        raise TimeoutError("read timed out")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DownloadError, match="TimeoutError: read timed out; run again to go on"):
        resolve("org/whole")


def test_hub_id_with_gguf() -> None:
    with pytest.raises(ConfigError, match="load_format 'gguf' does not go with the hub id 'org/model'"):
        resolve("org/model", load_format="gguf")


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r'pip install "sol-inference\[serve\]"'):
        resolve("org/model")
