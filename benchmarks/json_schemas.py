"""Random JSON Schemas in the manner of those that people send: forms, records, configurations, API payloads.

Draft 2020-12. Everything in them is bounded in length, so that a model which talks nonsense still comes to an end. A
tenth has one keyword that Sol does not support, and must be refused for it.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Final

Schema = dict[str, Any]

NAMES: Final = (
    "id", "name", "title", "kind", "email", "age", "price", "tags", "items", "address", "city", "zip", "active",
    "score", "created_at", "unit", "größe", "first name", "x-ref", "a/b", "~state", "$type", "quote\"d", "日付",
)  # fmt: skip
WORDS: Final = ("red", "green", "blue", "small", "größer", "in progress", "N/A", "1", '"', "a\\b", "émoji 🙂", "")
PATTERNS: Final = (
    r"^[a-z]{2,8}$", r"^\d{3}-\d{4}$", r"^[A-Z][a-z]{0,6}( [A-Z][a-z]{0,6})?$", r"^(yes|no|maybe)$", r"^#[0-9a-f]{6}$",
    r"^v\d{1,2}\.\d{1,2}$", r"^[^\s@]{1,6}@[a-z]{2,5}\.(com|org)$",
)  # fmt: skip
FORMATS: Final = ("date", "uuid", "ipv4", "time", "date-time", "ipv6")

UNSUPPORTED: Final[tuple[tuple[str, Schema], ...]] = (
    ("uniqueItems", {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True}),
    ("not", {"type": "string", "maxLength": 4, "not": {"const": "x"}}),
    ("if", {"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 9}}),
    ("contains", {"type": "array", "maxItems": 3, "contains": {"const": 1}}),
    ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("look-ahead", {"type": "string", "pattern": "^(?=a)[a-z]{3}$"}),
    ("nowhere.json", {"$ref": "https://example.org/nowhere.json"}),
)
"""What the refusal must name, and a schema with it."""


@dataclass(frozen=True, slots=True)
class Case:
    """A schema, and what its refusal must name if it has to be refused."""

    schema: Schema
    unsupported: str | None = None

    @property
    def text(self) -> str:
        return json.dumps(self.schema, ensure_ascii=False)


class SchemaWriter:
    """Schemas by a seed: the same seed, the same schemas."""

    def __init__(self, seed: int, *, unsupported_share: float = 0.1) -> None:
        self._random = random.Random(seed)
        self._unsupported_share = unsupported_share
        self._definitions: dict[str, Schema] = {}

    def case(self) -> Case:
        self._definitions = {}
        rng = self._random
        unsupported = rng.choice(UNSUPPORTED) if rng.random() < self._unsupported_share else None
        root = self._object(0) if rng.random() < 0.8 else self._any(0)
        if unsupported is not None:
            root = self._object(1)
            root["properties"]["odd"] = unsupported[1]
            root["required"] = [*root.get("required", []), "odd"]
        if rng.random() < 0.5:
            root = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Answer", **root}
        if self._definitions:
            root = {**root, "$defs": self._definitions}
        return Case(root, unsupported[0] if unsupported is not None else None)

    def _any(self, depth: int) -> Schema:
        rng = self._random
        simple = (self._string, self._string, self._integer, self._number, self._enum, self._constant, self._boolean)
        if depth >= 3 or rng.random() < 0.55:
            return rng.choice(simple)(depth)
        compound = (self._object, self._array, self._tuple, self._union, self._reference, self._nullable, self._merged)
        return rng.choice(compound)(depth + 1)

    def _object(self, depth: int) -> Schema:
        rng = self._random
        names = rng.sample(NAMES, rng.randint(1, 5 if depth < 2 else 2))
        schema: Schema = {
            "type": "object",
            "properties": {name: self._any(depth + 1) for name in names},
            "additionalProperties": False,
        }
        required = [name for name in names if rng.random() < 0.8]
        if required:
            schema["required"] = required
        if rng.random() < 0.2:
            schema["description"] = "What it is about."
        return schema

    def _array(self, depth: int) -> Schema:
        least = self._random.randint(0, 2)
        schema: Schema = {
            "type": "array",
            "items": self._any(depth + 1),
            "maxItems": least + self._random.randint(0, 2),
        }
        if least:
            schema["minItems"] = least
        return schema

    def _tuple(self, depth: int) -> Schema:
        parts = [self._any(depth + 1) for _ in range(self._random.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _union(self, depth: int) -> Schema:
        keyword = "anyOf"
        options = [self._any(depth + 1) for _ in range(self._random.randint(2, 3))]
        if self._random.random() < 0.3:  # told apart by a constant, as pydantic writes tagged unions
            keyword = "oneOf"
            options = []
            for kind in ("cat", "dog"):
                option = self._object(depth + 1)
                option["properties"] = {"kind": {"const": kind}, **option["properties"]}
                option["properties"]["kind"] = {"const": kind}
                option["required"] = sorted({"kind", *option.get("required", [])})
                options.append(option)
        return {keyword: options}

    def _reference(self, depth: int) -> Schema:
        name = f"Part{self._random.randint(1, 3)}"
        if name not in self._definitions:
            self._definitions[name] = {}  # so that it does not come to refer to itself
            self._definitions[name] = self._any(max(depth, 2))
        elif not self._definitions[name]:
            return self._boolean(depth)
        return {"$ref": f"#/$defs/{name}"}

    def _nullable(self, depth: int) -> Schema:
        if self._random.random() < 0.5:
            return {"type": [self._random.choice(("boolean", "null")), "null"]}
        return {"anyOf": [self._any(depth + 1), {"type": "null"}]}

    def _merged(self, depth: int) -> Schema:
        """`allOf` of two objects that know different names."""
        first, second = (self._random.sample(NAMES, 2)[:1] for _ in range(2))
        second = [name for name in second if name not in first]
        names = [*first, *second]
        parts = [{"type": "object", "properties": {name: self._any(depth + 1)}, "required": [name]} for name in names]
        closed = {"type": "object", "properties": dict.fromkeys(names, True), "additionalProperties": False}
        return {"allOf": [*parts, closed]}

    def _string(self, _depth: int) -> Schema:
        rng = self._random
        kind = rng.random()
        if kind < 0.25:
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        if kind < 0.4:
            return {"type": "string", "format": rng.choice(FORMATS), "maxLength": 40}
        least = rng.randint(0, 3)
        schema: Schema = {"type": "string", "maxLength": least + rng.randint(0, 10)}
        if least:
            schema["minLength"] = least
        return schema

    def _integer(self, _depth: int) -> Schema:
        rng = self._random
        low = rng.choice((-1000, -7, 0, 1, 18))
        high = low + rng.choice((0, 5, 99, 12345))
        schema: Schema = {"type": "integer", "minimum": low, "maximum": high}
        if rng.random() < 0.25:
            schema = {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
        if rng.random() < 0.2 and high - low > 20:
            schema["multipleOf"] = rng.choice((2, 5, 10))
        return schema

    def _number(self, _depth: int) -> Schema:
        return {"type": "number", "minimum": 0, "maximum": 500, "multipleOf": self._random.choice((0.5, 0.25, 1))}

    def _enum(self, _depth: int) -> Schema:
        values: list[Any] = self._random.sample(WORDS, self._random.randint(1, 4))
        if self._random.random() < 0.2:
            values += [None, 7, True]
        return {"enum": values}

    def _constant(self, _depth: int) -> Schema:
        return {"const": self._random.choice((*WORDS, 3, 2.5, None, False, [1, "a"], {"k": []}))}

    def _boolean(self, _depth: int) -> Schema:
        return {"type": "boolean"}
