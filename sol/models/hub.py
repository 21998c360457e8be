"""The Hugging Face hub as a source of models, through huggingface_hub and its cache (`HF_HOME`, `HF_TOKEN`,
`HF_HUB_OFFLINE` and `HF_ENDPOINT` mean what they always mean)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from sol.errors import ConfigError
from sol.models.hub_access import HubAccess, is_offline, token_to_send
from sol.models.hub_download import fetch_blobs
from sol.models.hub_errors import ChecksumError, explained, is_transient, response_of, seconds_to_wait

logger = logging.getLogger("sol.models.hub")

DESCRIPTION_PATTERNS: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "chat_template*",
    "special_tokens_map.json",
)
"""Everything but the weights: kilobytes to a few megabytes."""

INDEX_NAME: Final = "model.safetensors.index.json"

WEIGHT_PATTERNS: Final = ("*.safetensors", INDEX_NAME)

_IGNORED: Final = ("*/*", "consolidated*.safetensors", "adapter_model.safetensors")
"""Folders (`original/`, `onnx/` …), and the same weights once more in their publisher's own layout."""

_PAUSES: Final = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each further attempt after a failure that may pass, where the hub names none."""
_LONGEST_PAUSE: Final = 60.0
"""Where the hub asks for more, it is the user who should wait."""


def fetch_description(repo: str, access: HubAccess, *, progress: bool) -> Path:
    """Brings everything but the weights up to date; returns the directory it is in, whose name is the commit.

    Failures that may pass are tried again. Raises `ModelNotFoundError`, `DownloadError`, or `ConfigError` where
    huggingface_hub is not installed.
    """
    return _fetch(repo, access, lambda: _snapshot(repo, access.revision, DESCRIPTION_PATTERNS, access), progress)


def fetch_weights(repo: str, commit: str, access: HubAccess, *, progress: bool) -> Path:
    """The same for the safetensors files of that commit, whose directory it returns; what an earlier, interrupted
    attempt has brought of them is kept."""
    return _fetch(repo, access, lambda: _weights(repo, commit, access), progress)


def _fetch(repo: str, access: HubAccess, bring: Callable[[], Path], progress: bool) -> Path:
    try:
        from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    except ImportError:
        raise ConfigError(
            f"model {repo!r} is a hub id, and fetching it needs huggingface_hub: "
            'pip install "sol-inference[serve]", or give a path',
            param="model",
        ) from None
    quiet = not progress and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        return _tried_again(bring, repo)
    except Exception as error:
        # What the library or the HTTP client below it raises differs from version to version.
        raise explained(error, repo, access) from error
    finally:
        if quiet:
            enable_progress_bars()


def _tried_again(bring: Callable[[], Path], repo: str) -> Path:
    pauses = list(_PAUSES)
    while True:
        try:
            return bring()
        except Exception as error:
            asked = seconds_to_wait(error)
            if not pauses or not is_transient(error) or (asked or 0.0) > _LONGEST_PAUSE:
                raise
            pause = max(pauses.pop(0), asked or 0.0)
            if isinstance(error, ChecksumError):
                pauses.clear()  # it may have been a piece left by something else; a second time it is not
            logger.warning("Fetching %s: %s; trying again in %.0f s", repo, _in_short(error), pause)
            time.sleep(pause)


def _in_short(error: Exception) -> str:
    response = response_of(error)
    return f"the hub answers HTTP {response.status_code}" if response is not None else type(error).__name__


def _snapshot(
    repo: str, revision: str | None, patterns: Sequence[str], access: HubAccess, *, cached_only: bool = False
) -> Path:
    from huggingface_hub import snapshot_download

    token, _ = token_to_send(access)
    return Path(
        snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_IGNORED),
            token=False if token is None else token,
            local_files_only=cached_only or is_offline(access),
        )
    )


def _weights(repo: str, commit: str, access: HubAccess) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    if is_offline(access):
        cached = _cached_weights(repo, commit, access)
        if cached is None:
            raise LocalEntryNotFoundError(f"the cache lacks weights of {repo}")
        return cached
    storage = Path(constants.HF_HUB_CACHE).expanduser() / f"models--{repo.replace('/', '--')}"
    try:
        fetch_blobs(repo, commit, "*.safetensors", _IGNORED, token_to_send(access)[0], storage)
    except Exception:
        # A hub that is out of reach, or refuses, is no matter to whoever has all that is needed.
        cached = _cached_weights(repo, commit, access)
        if cached is None:
            raise
        return cached
    return _snapshot(repo, commit, WEIGHT_PATTERNS, access)


def _cached_weights(repo: str, commit: str, access: HubAccess) -> Path | None:
    """None where some are missing. Some versions of huggingface_hub return a directory without a look at what is in
    it."""
    try:
        root = _snapshot(repo, commit, WEIGHT_PATTERNS, access, cached_only=True)
        index = root / INDEX_NAME
        if not index.exists():
            return root if any(root.glob("*.safetensors")) else None
        shards = json.loads(index.read_text())["weight_map"].values()
    except Exception:
        return None  # the error that led here says more
    return root if all((root / shard).exists() for shard in shards) else None
