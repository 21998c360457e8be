"""Who reads an answer: its reasoning, its content, its tool calls."""

from __future__ import annotations

from collections.abc import Callable

from sol.sampling_params import SamplingParams
from sol.server.state import ServedModel
from sol.server.structured import check_grammar
from sol.server.tools import Tools
from sol.text.answer_parser import AnswerParser
from sol.text.reasoning import CLOSE
from sol.text.reasoning_grammar import after_reasoning


async def answer_parsers(
    model: ServedModel, prompt: str, params: SamplingParams, tools: Tools | None, *, show_reasoning: bool = True
) -> Callable[[], AnswerParser | None]:
    """What makes the parser of each answer to `prompt`, which the chat template made; it makes None where there is
    nothing to find.

    A grammar in `params` holds from an answer's first token on. If the prompt has begun to think, it is changed to
    hold behind the reasoning; one of a kind that cannot be changed leaves no reasoning to find.
    """
    if params.grammar is not None and model.answers.assumes_reasoning(prompt):
        reasoned = after_reasoning(params.grammar, model.answers.close_id)
        if reasoned is None:
            prompt += CLOSE
        else:
            await check_grammar(model, reasoned, param="messages")
            params.grammar = reasoned

    def new_parser() -> AnswerParser | None:
        return model.answers.parser(
            prompt,
            None if tools is None else tools.parser(model.answers),
            max_calls=None if tools is None else tools.max_calls,
            show_reasoning=show_reasoning,
        )

    return new_parser
