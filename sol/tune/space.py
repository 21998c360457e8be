"""What may be varied: parameters with a list of values each, and the configurations that they make.

A space is finite on purpose. Engines take powers of two as well as anything between, what lies between is worth little,
and a finite space can be searched to its end, which is how a search is tested.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from sol.errors import ConfigError

Demand = Literal["grows", "none", "differs"]
"""How what a configuration needs in order to run depends on a parameter.

`grows`    with its place in the list of values: who dies with 256 requests in a step dies with 512.
`none`     not at all, or hardly.
`differs`  from value to value, in no order.
"""

Config = Mapping[str, Any]
"""A value for each parameter of a space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Raises `ConfigError` for values that are none, or the same twice."""

    name: str
    """As the engine's option is called."""
    values: tuple[Any, ...]
    """JSON values. Numbers ascend."""
    demand: Demand = "differs"
    lossless: Any = None
    """The value that changes no answer, of a parameter whose other values do."""
    lossy: bool = False

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigError(f"{self.name} needs at least one value to try", param=self.name)
        if len({json.dumps(value) for value in self.values}) != len(self.values):
            raise ConfigError(f"{self.name} has a value twice: {list(self.values)}", param=self.name)
        if self.is_ordered and list(self.values) != sorted(self.values):
            raise ConfigError(f"{self.name}: numbers must ascend, not {list(self.values)}", param=self.name)
        if self.lossy and self.lossless not in self.values:
            raise ConfigError(
                f"{self.name} needs {self.lossless!r} among its values, which the others are compared with",
                param=self.name,
            )

    @property
    def is_ordered(self) -> bool:
        return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in self.values)


class Space:
    """All combinations of values. A `Runner` refuses those that make no sense."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        names = [parameter.name for parameter in parameters]
        if len(set(names)) != len(names):
            raise ConfigError(f"a parameter appears twice: {', '.join(names)}", param="space")
        if not parameters:
            raise ConfigError("a space needs a parameter at least", param="space")
        self.parameters: Final = tuple(parameters)

    @property
    def size(self) -> int:
        """Configurations, those that make no sense included."""
        count = 1
        for parameter in self.parameters:
            count *= len(parameter.values)
        return count

    def __iter__(self) -> Iterator[Config]:
        names = [parameter.name for parameter in self.parameters]
        for values in itertools.product(*(parameter.values for parameter in self.parameters)):
            yield dict(zip(names, values, strict=True))

    def __contains__(self, config: Config) -> bool:
        return set(config) == {parameter.name for parameter in self.parameters} and all(
            config[parameter.name] in parameter.values for parameter in self.parameters
        )

    def place(self, config: Config) -> tuple[int, ...]:
        """The place of each value in its parameter's list."""
        return tuple(parameter.values.index(config[parameter.name]) for parameter in self.parameters)

    def at(self, place: Sequence[int]) -> Config:
        return {
            parameter.name: parameter.values[index] for parameter, index in zip(self.parameters, place, strict=True)
        }

    def neighbours(self, config: Config) -> Iterator[Config]:
        """Those that differ in one parameter: by one place if it is ordered, in any value if it is not; then those of
        ordered parameters that are two places away."""
        place = self.place(config)
        for distance in (1, 2):
            for number, parameter in enumerate(self.parameters):
                for index in range(len(parameter.values)):
                    if parameter.is_ordered:
                        near = abs(index - place[number]) == distance
                    else:
                        near = index != place[number] and distance == 1
                    if near:
                        yield self.at((*place[:number], index, *place[number + 1 :]))

    def lossy_part(self, config: Config) -> dict[str, Any]:
        """What of it changes answers: empty for a configuration that changes none."""
        return {
            parameter.name: config[parameter.name]
            for parameter in self.parameters
            if parameter.lossy and config[parameter.name] != parameter.lossless
        }

    def describe(self) -> dict[str, Any]:
        return {parameter.name: list(parameter.values) for parameter in self.parameters}


def key_of(config: Config) -> str:
    """The same for equal configurations."""
    return json.dumps(dict(config), sort_keys=True)
