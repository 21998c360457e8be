"""What crashes teach: which other configurations would die as one did.

Two rules, both of which one success takes back:

- Demand. If a configuration died, so will one that is the same in everything that `differs` and asks for as much or
  more in everything that `grows`. A success of one that is at least as demanding as the dead one shows that its death
  had another cause; then only itself is excluded.
- Values. If two configurations with a value of a parameter that `differs` died where others that ask for as much ran,
  and none with it ever ran, the value is excluded: an engine without kernels for it, for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sol.tune.space import Config, Parameter, Space, key_of

_DEATHS: int = 2
"""With a value, and no success, that condemn it."""


@dataclass(slots=True)
class Constraints:
    space: Space
    _died: list[tuple[Config, str]] = field(default_factory=list)
    _ran: list[Config] = field(default_factory=list)

    def add_crash(self, config: Config, reason: str) -> None:
        self._died.append((config, reason))

    def add_success(self, config: Config) -> None:
        self._ran.append(config)

    def excludes(self, config: Config) -> str | None:
        """Why `config` would die, too."""
        for dead, reason in self._died:
            if key_of(dead) == key_of(config):
                return f"it died before: {reason}"
        for dead, reason in self._died:
            if self._as_demanding(config, dead) and not any(self._as_demanding(ran, dead) for ran in self._ran):
                return f"it asks for at least as much as one that died ({_difference(dead, config)}): {reason}"
        for parameter in self._differing():
            value = config[parameter.name]
            if any(ran[parameter.name] == value for ran in self._ran):
                continue
            deaths = [
                reason
                for dead, reason in self._died
                if dead[parameter.name] == value and any(self._asks_as_much(ran, dead) for ran in self._ran)
            ]
            if len(deaths) >= _DEATHS:
                return f"all {len(deaths)} with {parameter.name} {value!r} died, others ran: {deaths[-1]}"
        return None

    def describe(self) -> list[str]:
        """What is excluded, for people."""
        lines = []
        for dead, reason in self._died:
            explained = not any(self._as_demanding(ran, dead) for ran in self._ran)
            growing = [p for p in self.space.parameters if p.demand == "grows"]
            like = ", ".join(f"{p.name} {dead[p.name]!r} or more" for p in growing)
            same = ", ".join(f"{p.name} {dead[p.name]!r}" for p in self._differing())
            scope = " with ".join(part for part in (like, same) if part)
            lines.append(f"{scope}: {reason}" if explained and scope else f"{key_of(dead)} alone: {reason}")
        return lines

    def _differing(self) -> Iterable[Parameter]:
        return [parameter for parameter in self.space.parameters if parameter.demand == "differs"]

    def _as_demanding(self, one: Config, other: Config) -> bool:
        """Whether `one` needs all that `other` does, and differs in nothing that matters otherwise."""
        return self._asks_as_much(one, other) and all(one[p.name] == other[p.name] for p in self._differing())

    def _asks_as_much(self, one: Config, other: Config) -> bool:
        return all(
            parameter.values.index(one[parameter.name]) >= parameter.values.index(other[parameter.name])
            for parameter in self.space.parameters
            if parameter.demand == "grows"
        )


def _difference(dead: Config, config: Config) -> str:
    parts = [f"{name} {dead[name]!r}" for name in config if config[name] != dead[name]]
    return ", ".join(parts) or "the same"
