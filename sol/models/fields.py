"""Typed reads from what a model's author wrote: JSON files and GGUF metadata. A missing or ill-typed value is an error
that names the file and the field, not a surprise three layers later."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sol.errors import CheckpointError


class _Required:
    pass


REQUIRED: Final = _Required()


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; `CheckpointError` when it cannot be read or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", param="model") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", param="model") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}", param="model")
    return value


class Fields:
    """A mapping whose values are checked as they are read. null and absent are the same."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values = values
        self.origin = origin
        """What an error calls the place: the file's path."""

    def integer(self, key: str, default: int | _Required = REQUIRED) -> int:
        """A whole number of at least 1."""
        value = self._get(key, default)
        if type(value) is not int or value < 1:
            raise self.error(key, value, "a whole number of at least 1")
        return value

    def number(self, key: str, default: float | _Required = REQUIRED) -> float:
        """A finite number greater than 0."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.error(key, value, "a number greater than 0")
        return float(value)

    def boolean(self, key: str, default: bool | _Required = REQUIRED) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.error(key, value, "true or false")
        return value

    def string(self, key: str, default: str | _Required = REQUIRED) -> str:
        value = self._get(key, default)
        if type(value) is not str:
            raise self.error(key, value, "a string")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of ids, all inside the vocabulary; empty when absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise self.error(key, value, f"token ids from 0 to {vocab_size - 1}")
        return tuple(dict.fromkeys(ids))

    def error(self, key: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.origin}: {key} must be {expected}, not {value!r}", param="model")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise CheckpointError(f"{self.origin} does not say {key}", param="model")
        return default
