"""Files with options by their names: YAML, or JSON where the name ends in .json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sol.errors import ConfigError


def read_file(path: Path) -> Any:
    """What it holds; None for an empty one. Raises `ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="config") from None
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}", param="config") from None
    import yaml  # only who writes YAML needs it

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Takes 4e-8 for a number, as YAML 1.2 and everybody who writes it do; PyYAML's 1.1 has it a string."""

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+"), list("-+0123456789")
    )
    try:
        return yaml.load(text, Loader)  # noqa: S506  (it is a SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}", param="config") from None


def read_options(path: Path) -> dict[str, Any]:
    """Options and their values; names with `-` as flags have it are taken for those with `_`. Raises `ConfigError`."""
    data = read_file(path)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold options and their values, like port: 8000", param="config")
    options: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name in options:
            raise ConfigError(f"{path} has {name} twice", param=name)
        options[name] = value
    return options
