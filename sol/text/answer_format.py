"""Which forms a model writes its reasoning and its tool calls in: as its owner says, or as its chat template shows."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Final

from sol.text.answer_parser import AnswerParser
from sol.text.chat_template import ChatTemplate
from sol.text.reasoning import CLOSE, DeepSeekR1Parser, ReasoningParser
from sol.text.tokenizer import Tokenizer
from sol.text.tools.parsers import HermesParser, Llama3JsonParser, MistralParser, ToolParser

TOOL_PARSERS: Final[dict[str, type[ToolParser]]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}
"""By vLLM's names."""
REASONING_PARSERS: Final[dict[str, type[ReasoningParser]]] = {"deepseek_r1": DeepSeekR1Parser, "qwen3": ReasoningParser}
AUTO: Final = "auto"
"""As the chat template shows."""
NONE: Final = "none"

_READS_TOOLS: Final = re.compile(r"\{[%{][^}]*\btools\b")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Of one model; the same for all of its answers."""

    tools: type[ToolParser] | None = None
    """None: a call that the model was not made to make is not recognised."""
    reasoning: type[ReasoningParser] | None = None
    shows_tools: bool = False
    """The chat template tells the model of its tools."""
    auto_tool_choice: bool = True
    """The model may choose to call one."""
    marker_ids: Mapping[str, int] = field(default_factory=dict)
    """Markers that are special tokens."""
    required: type[ToolParser] | None = None
    """In whose form the model can be made to call; None: in a list of calls that no model was trained on."""

    @property
    def kept_ids(self) -> frozenset[int]:
        """Special tokens that the parsers have to see."""
        return frozenset(self.marker_ids.values())

    @property
    def close_id(self) -> int | None:
        """The token that ends reasoning, if it is a special one."""
        return self.marker_ids.get(CLOSE)

    @classmethod
    def of(
        cls,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        *,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        auto_tool_choice: bool = True,
    ) -> AnswerFormat:
        """`tool_parser` and `reasoning_parser` are names of the tables above, or `auto`, or `none`."""
        source = "" if template is None else template.source
        tools = _shown_tools(source) if tool_parser == AUTO else TOOL_PARSERS.get(tool_parser)
        reasoning = _shown_reasoning(source) if reasoning_parser == AUTO else REASONING_PARSERS.get(reasoning_parser)
        markers = {marker.encode(): marker for parser in (tools, reasoning) if parser for marker in parser.markers}
        special = {tokenizer.token_bytes(i): i for i in tokenizer.special_ids}
        marker_ids = {marker: special[text] for text, marker in markers.items() if text in special}
        shows_tools = _READS_TOOLS.search(source) is not None
        # Mistral's newer form has another place for the name.
        known = shows_tools and tools is not None and "[ARGS]" not in source
        return cls(tools, reasoning, shows_tools, auto_tool_choice, marker_ids, tools if known else None)

    def parser(
        self,
        prompt: str,
        tools: ToolParser | None = None,
        *,
        max_calls: int | None = None,
        show_reasoning: bool = True,
    ) -> AnswerParser | None:
        """Of an answer to `prompt`, as the chat template made it. None where there is nothing to find."""
        reasoning = None if self.reasoning is None else self.reasoning(prompt)
        if tools is None and reasoning is None:
            return None
        return AnswerParser(reasoning, tools, max_calls=max_calls, show_reasoning=show_reasoning)

    def assumes_reasoning(self, prompt: str) -> bool:
        """Whether an answer to `prompt` begins in the middle of reasoning."""
        return self.reasoning is not None and self.reasoning.assumes(prompt)

    def tool_parser(self, names: Container[str]) -> ToolParser | None:
        return None if self.tools is None else self.tools(names)


def _shown_tools(source: str) -> type[ToolParser] | None:
    if "[TOOL_CALLS]" in source:
        return MistralParser
    # Others write <tool_call>, too, but something else than JSON inside of it.
    if "<tool_call>" in source and not re.search(r"<function=|<arg_key>|<parameter=", source):
        return HermesParser
    if "<|python_tag|>" in source or ('"parameters": dictionary' in source and "<|start_header_id|>" in source):
        return Llama3JsonParser
    return None


def _shown_reasoning(source: str) -> type[ReasoningParser] | None:
    if CLOSE not in source:
        return None
    # The first models of this kind think before every answer, and their templates know no other way.
    return ReasoningParser if "enable_thinking" in source or "｜Assistant｜" not in source else DeepSeekR1Parser
