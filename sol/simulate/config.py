"""What a simulated server is started with: from a profile, a YAML or JSON file and flags, each above the one before."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sol.errors import ConfigError
from sol.option_files import read_file, read_options
from sol.simulate.faults import Fault, parse_fault
from sol.simulate.laws import DEFAULT_PROFILE, PROFILES, EngineLaws, TextLaws

_LAW_FIELDS: Final = {item.name for item in dataclasses.fields(EngineLaws)}
_TEXT_FIELDS: Final = {item.name for item in dataclasses.fields(TextLaws)}
_SERVER_FIELDS: Final = {"host", "port", "control_port", "drain_seconds", "startup_seconds"}
FILE_KEYS: Final = _LAW_FIELDS | _TEXT_FIELDS | _SERVER_FIELDS | {"profile", "served_model_name", "faults"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """Raises `ConfigError` for values that cannot work."""

    laws: EngineLaws = field(default_factory=EngineLaws)
    text: TextLaws = field(default_factory=TextLaws)
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free port."""
    control_port: int | None = None
    """Where /simulate/* answers whatever faults there are; None: on `port` alone, which they can close."""
    served_model_names: tuple[str, ...] = ("simulated",)
    """The names clients may ask for; the first is the one in metrics."""
    faults: tuple[Fault, ...] = ()
    """From the moment on at which the server listens."""
    startup_seconds: float = 0.0
    """How long it is there and not ready."""
    drain_seconds: float = 30.0
    """How long open requests may go on when the server is told to stop."""

    def __post_init__(self) -> None:
        for name in ("port", "control_port"):
            value = getattr(self, name)
            if value is None and name == "control_port":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 65535:
                raise ConfigError(f"{name} must be 0 (any free one) to 65535, not {value!r}", param=name)
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError("host must be an address or a name, for instance 127.0.0.1 or 0.0.0.0", param="host")
        for name in ("startup_seconds", "drain_seconds"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e9:
                raise ConfigError(f"{name} must be a number of seconds, at least 0, not {value!r}", param=name)
        names: tuple[object, ...] = self.served_model_names
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError("served_model_name must be a name or several, none of them empty",
                              param="served_model_name")  # fmt: skip


def simulate_config(
    given: Mapping[str, Any], *, file: Path | None = None, more_faults: Sequence[Any] = ()
) -> SimulateConfig:
    """The configuration of `file` (`FILE_KEYS`), with what is `given` above it, and some more faults than its own.

    Raises `ConfigError`.
    """
    options = {**(read_options(file) if file is not None else {}), **given}
    for name in options:
        if name not in FILE_KEYS:
            raise ConfigError(f"unknown option {name!r:.80}: remove it, or correct its name", param=str(name)[:80])
    name = options.pop("profile", DEFAULT_PROFILE)
    if not isinstance(name, str) or name not in PROFILES:
        raise ConfigError(f"profile must be one of {', '.join(PROFILES)}, not {name!r:.80}", param="profile")
    laws = {**PROFILES[name], **{key: value for key, value in options.items() if key in _LAW_FIELDS}}
    names = options.pop("served_model_name", ["simulated"])
    faults = options.pop("faults", [])
    if not isinstance(faults, list):
        raise ConfigError(f"faults must be a list, not {faults!r:.80}", param="faults")
    return SimulateConfig(
        laws=EngineLaws(**laws),
        text=TextLaws(**{key: value for key, value in options.items() if key in _TEXT_FIELDS}),
        served_model_names=tuple([names] if isinstance(names, str) else names or ()),
        faults=tuple(map(parse_fault, [*faults, *more_faults])),
        **{key: value for key, value in options.items() if key in _SERVER_FIELDS},
    )


def read_faults(path: Path) -> list[Any]:
    """The list of faults in a YAML or JSON file, each as it stands there. Raises `ConfigError`."""
    data = read_file(path)
    if not isinstance(data, list):
        raise ConfigError(f"{path} must hold a list of faults, like [{{kind: stall, seconds: 1}}]", param="faults")
    return data
