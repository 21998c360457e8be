"""Structured output: the fields that ask for it, and the one grammar that they come to.

OpenAI's `response_format` (`text.format` in `/v1/responses`), vLLM's `structured_outputs` and its older `guided_json`,
`guided_regex`, `guided_choice` and `guided_grammar`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from sol.errors import QueueFullError, RequestError
from sol.grammar import Grammar
from sol.server.protocol import GenerationBody, JsonSchemaFormat, TextFormat
from sol.server.state import ServedModel

MAX_WAITING = 64
"""Grammars that may be compiled at a time, or wait for it."""

_FORMATS = "'text', 'json_object' or 'json_schema'"


async def grammar_of(model: ServedModel, body: GenerationBody, text_format: TextFormat | None = None) -> Grammar | None:
    """What the output has to match; None for anything. Raises `RequestError` for two wishes at once and for what
    cannot be compiled, before anything is generated."""
    wishes = [*_wishes(body)]
    if text_format is not None:
        wishes += _of_format(text_format.type, text_format, "text.format", "text.format")
    if not wishes:
        return None
    if len(wishes) > 1:
        raise RequestError(
            f"{wishes[1][0]} and {wishes[0][0]} both say what the output has to look like; send one of them",
            param=wishes[1][0],
        )
    ((param, grammar),) = wishes
    await check_grammar(model, grammar, param=param)
    return grammar


async def check_grammar(model: ServedModel, grammar: Grammar, *, param: str) -> None:
    """Raise `RequestError` naming `param` for a grammar that cannot be compiled, `QueueFullError` if too many wait.
    Compiling leaves the event loop."""
    if model.grammars.is_compiled(grammar):
        return
    if model.grammars.num_waiting >= MAX_WAITING:
        raise QueueFullError(f"{MAX_WAITING} grammars wait to be compiled already; try again later")
    try:
        # Shielded: others may wait for the same one.
        await asyncio.shield(asyncio.wrap_future(model.grammars.submit(grammar)))
    except RequestError as error:
        raise RequestError(f"{param}: {error.message}", param=param) from None


def _wishes(body: GenerationBody) -> Iterator[tuple[str, Grammar]]:
    """Each field that asks for something, and for what."""
    wanted = body.response_format
    if wanted is not None:
        yield from _of_format(wanted.type, wanted.json_schema, "response_format", "response_format.json_schema")
    options = body.structured_outputs
    if options is not None:
        yield from _of_fields(
            "structured_outputs.", options.json_, options.regex, options.choice, options.grammar, options.json_object
        )
    yield from _of_fields("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar, None)


def _of_format(
    kind: str, schema: JsonSchemaFormat | TextFormat | None, param: str, path: str
) -> Iterator[tuple[str, Grammar]]:
    if kind == "json_schema":
        if schema is None or schema.schema_ is None:
            raise RequestError(f"{path}.schema is required with {param}.type 'json_schema'", param=f"{path}.schema")
        yield f"{path}.schema", Grammar.json_schema(schema.schema_, param=f"{path}.schema")
        return
    if schema is not None and schema.model_fields_set - {"type"}:
        raise RequestError(
            f"{path} has a schema, which needs {param}.type 'json_schema', not {kind[:80]!r}", param=f"{param}.type"
        )
    if kind == "json_object":
        yield param, Grammar.json_object()
    elif kind != "text":
        raise RequestError(f"{param}.type must be {_FORMATS}, not {kind[:80]!r}", param=f"{param}.type")


def _of_fields(
    prefix: str,
    schema: Any,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    json_object: bool | None,
) -> Iterator[tuple[str, Grammar]]:
    if schema is not None:
        yield f"{prefix}json", Grammar.json_schema(schema, param=f"{prefix}json")
    if regex is not None:
        yield f"{prefix}regex", Grammar.regex(regex, param=f"{prefix}regex")
    if choice is not None:
        yield f"{prefix}choice", Grammar.choice(choice, param=f"{prefix}choice")
    if grammar is not None:
        yield f"{prefix}grammar", Grammar.ebnf(grammar, param=f"{prefix}grammar")
    if json_object:
        yield f"{prefix}json_object", Grammar.json_object()
