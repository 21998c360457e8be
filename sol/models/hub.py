"""The Hugging Face hub as a source of models, through huggingface_hub and its cache (`HF_HOME`, `HF_TOKEN`,
`HF_HUB_OFFLINE` and `HF_ENDPOINT` mean what they always mean)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sol.errors import ConfigError, DownloadError, ModelNotFoundError

DESCRIPTION_PATTERNS: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "chat_template*",
    "special_tokens_map.json",
)
"""Everything but the weights: kilobytes to a few megabytes."""

WEIGHT_PATTERNS: Final = ("*.safetensors", "model.safetensors.index.json")

_IGNORED: Final = ("*/*", "consolidated*.safetensors", "adapter_model.safetensors")
"""Folders (`original/`, `onnx/` …), and the same weights once more in their publisher's own layout."""


def fetch(repo: str, patterns: Sequence[str], *, progress: bool) -> Path:
    """Brings those files of a repository up to date; returns the directory they are in.

    Raises `ModelNotFoundError`, `DownloadError`, or `ConfigError` where huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import errors, snapshot_download
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
        return Path(snapshot_download(repo, allow_patterns=list(patterns), ignore_patterns=list(_IGNORED)))
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"model {repo!r} is neither a path nor a hub id: {error}", param="model") from error
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"model {repo!r} is gated: accept its licence at https://huggingface.co/{repo}, then set HF_TOKEN to a "
            "token of that account",
            param="model",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"model {repo!r} is neither a path here nor a repository on the hub (if it is private, set HF_TOKEN)",
            param="model",
        ) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise _no_answer(repo, error) from error
    except Exception as error:
        # Whatever else the library or the HTTP client below it raises, which differ from version to version.
        raise DownloadError(
            f"model {repo!r} could not be fetched: {type(error).__name__}: {error}; run again to go on where it "
            "stopped",
            param="model",
        ) from error
    finally:
        if quiet:
            enable_progress_bars()


def _no_answer(repo: str, error: Exception) -> DownloadError:
    """The hub refused, failed, or was not reached; the first two may hide as the cause of "not in the cache"."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    if response is None:
        message = (
            f"model {repo!r} is not in the hub's cache, or not completely, and the hub cannot be reached: connect this "
            "machine (and unset HF_HUB_OFFLINE), or give a path"
        )
    elif response.status_code in (401, 403):
        message = (
            f"the hub refuses model {repo!r} (HTTP {response.status_code}): accept its licence at "
            f"https://huggingface.co/{repo} and set HF_TOKEN to a token that may read it"
        )
    else:
        message = f"model {repo!r} could not be fetched: the hub answers HTTP {response.status_code}; try again later"
    return DownloadError(message, param="model")
