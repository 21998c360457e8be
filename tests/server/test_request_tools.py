"""What the fields of a request about tools come to, for models of different kinds."""

from __future__ import annotations

from typing import Any

import pytest

from sol.errors import RequestError
from sol.server.tool_fields import FunctionDefinition, ToolChoice
from sol.server.tools import Tools, tools_of
from sol.text.answer_format import AnswerFormat
from sol.text.tools.parsers import ForcedArgumentsParser, ForcedCallsParser, HermesParser

FUNCTIONS = [
    FunctionDefinition(name="f", description="F."),
    FunctionDefinition(name="g", parameters={"type": "object"}),
]
CALLING = AnswerFormat(tools=HermesParser, shows_tools=True)
REQUIRED, NAMED = ToolChoice("required"), ToolChoice("named", "g")


def make(answers: AnswerFormat, choice: ToolChoice | None = None, parallel: bool | None = None) -> Tools:
    tools = tools_of(answers, FUNCTIONS, choice, parallel, path="tools[{}].function")
    assert tools is not None
    return tools


@pytest.mark.parametrize(
    ("choice", "parser", "has_grammar"),
    [
        (None, HermesParser, False),
        (ToolChoice("auto"), HermesParser, False),
        (ToolChoice("none"), type(None), False),
        (REQUIRED, ForcedCallsParser, True),
        (NAMED, ForcedArgumentsParser, True),
    ],
)
def test_choices(choice: ToolChoice | None, parser: type[Any], has_grammar: bool) -> None:
    tools = make(CALLING, choice)
    assert type(tools.parser(CALLING)) is parser
    assert (tools.grammar(CALLING) is not None) == has_grammar
    assert (tools.for_template() is None) == (choice == ToolChoice("none"))
    assert (tools.max_calls, make(CALLING, choice, parallel=False).max_calls) == (None, 1)


@pytest.mark.parametrize(
    "answers",
    [
        AnswerFormat(tools=HermesParser, shows_tools=True, auto_tool_choice=False),
        AnswerFormat(tools=HermesParser),
        AnswerFormat(shows_tools=True),
    ],
)
def test_a_model_that_cannot_choose_can_be_made_to_call(answers: AnswerFormat) -> None:
    for choice, param in ((None, "tools"), (ToolChoice("auto"), "tool_choice")):
        with pytest.raises(RequestError) as error:
            make(answers, choice)
        assert error.value.param == param
        assert "required" in error.value.message
    for choice in (REQUIRED, NAMED, ToolChoice("none")):
        make(answers, choice)


def test_no_tools() -> None:
    for choice in (None, ToolChoice("none")):
        assert tools_of(CALLING, [], choice, True, path="") is None
    for choice in (REQUIRED, NAMED, ToolChoice("auto")):
        with pytest.raises(RequestError, match="no tools"):
            tools_of(CALLING, [], choice, None, path="")


def test_a_template_gets_every_field_that_one_may_read() -> None:
    assert make(CALLING).for_template() == [
        {
            "type": "function",
            "function": {"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {}}},
        },
        {"type": "function", "function": {"name": "g", "description": "", "parameters": {"type": "object"}}},
    ]
