"""The tools of a request: what the chat template is told of them, what the model is held to, who reads the answer."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sol.errors import RequestError
from sol.grammar import Grammar
from sol.server.state import ServedModel
from sol.server.structured import check_grammar
from sol.server.tool_fields import FunctionDefinition, ToolChoice
from sol.text.answer_format import AnswerFormat
from sol.text.tools.forms import required_calls
from sol.text.tools.parsers import ForcedArgumentsParser, ForcedCallsParser, MistralParser, ToolParser
from sol.text.tools.schemas import arguments_schema, calls_schema

_AUTO: Final = ToolChoice("auto")
_MISTRAL_ID: Final = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Tools:
    """`functions` may be called as `choice` says; `parallel`: several in one answer."""

    functions: tuple[FunctionDefinition, ...]
    choice: ToolChoice
    parallel: bool

    @property
    def forced(self) -> bool:
        """A grammar makes the model call."""
        return self.choice.mode in ("required", "named")

    @property
    def max_calls(self) -> int | None:
        return None if self.parallel else 1

    def for_template(self) -> list[dict[str, Any]] | None:
        """As chat templates have them, which is OpenAI's form with nothing missing; None if none may be called."""
        if self.choice.mode == "none":
            return None
        described = []
        for function in self.functions:
            parameters = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
            fields = {"name": function.name, "description": function.description or "", "parameters": parameters}
            described.append({"type": "function", "function": fields})
        return described

    def parser(self, answers: AnswerFormat) -> ToolParser | None:
        """A new one, for one answer."""
        names = frozenset(function.name for function in self.functions)
        match self.choice.mode:
            case "named":
                return ForcedArgumentsParser(self.choice.name)
            case "required":
                return ForcedCallsParser(names) if answers.required is None else answers.required(names)
            case "auto":
                return answers.tool_parser(names)
        return None

    def grammar(self, answers: AnswerFormat) -> Grammar | None:
        """What a forced call must match. Raises `RequestError` for what is too large."""
        if self.choice.mode == "named":
            (function,) = (one for one in self.functions if one.name == self.choice.name)
            return Grammar.json_schema(arguments_schema(function.parameters), param="tools")
        if self.choice.mode == "required":
            parameters = {function.name: function.parameters for function in self.functions}
            if answers.required is not None:
                return required_calls(answers.required, parameters, answers.marker_ids, parallel=self.parallel)
            return Grammar.json_schema(calls_schema(parameters, parallel=self.parallel), param="tools")
        return None


def tools_of(
    answers: AnswerFormat,
    functions: Sequence[FunctionDefinition],
    choice: ToolChoice | None,
    parallel: bool | None,
    *,
    path: str,
) -> Tools | None:
    """The tools of a request; None where it has none. `path` is where a function's fields are, `tools[{}].function` or
    `tools[{}]`. Raises `RequestError`."""
    if not functions:
        if choice is not None and choice.mode != "none":
            raise RequestError(
                f"tool_choice is {choice.name or choice.mode!r}, but there are no tools; send tools, or leave it out",
                param="tool_choice",
            )
        return None
    seen: dict[str, int] = {}
    for i, function in enumerate(functions):
        if function.name in seen:
            raise RequestError(
                f"{path.format(i)}.name is {function.name!r}, as that of tools[{seen[function.name]}]: give each tool "
                "a name of its own",
                param=f"{path.format(i)}.name",
            )
        seen[function.name] = i
    given, choice = choice is not None, choice or _AUTO
    if choice.mode == "named" and choice.name not in seen:
        raise RequestError(
            f"tool_choice names {choice.name[:128]!r}, which is not one of tools ({', '.join(seen)})"[:500],
            param="tool_choice",
        )
    if choice.mode == "auto":
        _check_auto(answers, param="tool_choice" if given else "tools")
    return Tools(tuple(functions), choice, parallel is not False)


def _check_auto(answers: AnswerFormat, *, param: str) -> None:
    forced = "tool_choice 'required', or one that names a tool, works with every model"
    if not answers.auto_tool_choice:
        raise RequestError(f"tool_choice 'auto' is switched off on this server; {forced}", param=param)
    if answers.tools is None or not answers.shows_tools:
        missing = (
            "this model's chat template does not tell it of tools"
            if not answers.shows_tools
            else "it is not known in what form this model calls tools (--tool-call-parser would say it)"
        )
        raise RequestError(f"tool_choice 'auto' is not possible: {missing}; {forced}", param=param)


async def forced_grammar(
    model: ServedModel, tools: Tools | None, other: Grammar | None, *, path: str
) -> Grammar | None:
    """The grammar of a request: that of its forced call, or the `other` one that its fields ask for. Raises
    `RequestError` for both at once, and for a tool whose schema cannot be held to, which it names."""
    grammar = None if tools is None else tools.grammar(model.answers)
    if tools is None or grammar is None:
        return other
    if other is not None:
        raise RequestError(
            f"tool_choice {tools.choice.name or tools.choice.mode!r} says what the output has to look like, and so "
            "does the format that is asked for; send one of them",
            param="tool_choice",
        )
    try:
        await check_grammar(model, grammar, param="tools")
    except RequestError:
        for i, function in enumerate(tools.functions):
            if tools.choice.mode == "required" or function.name == tools.choice.name:
                param = f"{path.format(i)}.parameters"
                alone = Grammar.json_schema(arguments_schema(function.parameters), param=param)
                await check_grammar(model, alone, param=param)
        raise
    return grammar


def new_call_id(answers: AnswerFormat) -> str:
    """Of a call. Mistral's templates take none but their own form."""
    if answers.tools is MistralParser:
        return "".join(secrets.choice(_MISTRAL_ID) for _ in range(9))
    return f"call_{uuid.uuid4().hex}"
