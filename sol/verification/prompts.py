"""What is generated from: four built-in prompts whose answers a drafter finds more or less easy, or the user's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sol.errors import RequestError
from sol.text.chat_template import ChatTemplate
from sol.text.messages import flatten_messages
from sol.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    name: str
    token_ids: list[int]


_PASSAGE: Final = (
    "The lighthouse at the end of the pier was built in 1874 by a crew of eleven men. Its lamp burned whale oil, "
    "then kerosene, and from 1931 on it was electric. The keeper wrote the weather into a book every morning: wind, "
    "clouds, the height of the waves, and the names of the ships that passed."
)
_COPY: Final = f"Text:\n{_PASSAGE}\n\nThe same text again, word for word:\n"
_CHAT: Final = "Explain in a few sentences why the sky is blue during the day and red in the evening."
_CODE: Final = """class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def add(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def subtract(self, other):
        return Point(self.x - other.x, self.y - other.y)

    def multiply(self, other):
"""
REPETITION: Final = "red, green, blue, red, green, blue, red, green, blue, red, green, blue, red, green,"

FOLLOW_UP: Final = "\n\nOnce more, from the beginning:\n"
"""What a second turn adds to a prompt and its answer."""


def built_in_prompts(tokenizer: Tokenizer, template: ChatTemplate | None) -> list[Prompt]:
    """`copy`, `chat`, `code` and `repetition`; the chat as the model's template writes it, if it has one."""
    chat = (
        tokenizer.encode(_CHAT)
        if template is None
        else _chat(tokenizer, template, [{"role": "user", "content": _CHAT}])
    )
    return [
        Prompt("copy", tokenizer.encode(_COPY)),
        Prompt("chat", chat),
        Prompt("code", tokenizer.encode(_CODE)),
        Prompt("repetition", tokenizer.encode(REPETITION)),
    ]


def read_prompts(path: Path, tokenizer: Tokenizer, load_template: Callable[[], ChatTemplate | None]) -> list[Prompt]:
    """One prompt a line, empty lines left out. In a file named *.jsonl each line is a JSON string,
    `{"prompt": text}` or `{"messages": [...]}`.

    Raises `RequestError` naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--prompts {path} cannot be read: {error}", param="prompts") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path.name}, line {number}"
        value: Any = line
        if path.suffix == ".jsonl":
            try:
                value = json.loads(line)
            except ValueError as error:
                raise RequestError(f"{where} is not JSON: {error}", param="prompts") from None
        prompts.append(Prompt(f"line {number}", _encode(value, where, tokenizer, load_template)))
    if not prompts:
        raise RequestError(f"--prompts {path} has no prompts: write one a line", param="prompts")
    return prompts


def _encode(
    value: Any, where: str, tokenizer: Tokenizer, load_template: Callable[[], ChatTemplate | None]
) -> list[int]:
    if isinstance(value, dict) and set(value) == {"messages"}:
        template = load_template()
        if template is None:
            raise RequestError(f"{where} has messages, but the model has no chat template", param="prompts")
        if not isinstance(value["messages"], list) or not all(isinstance(one, dict) for one in value["messages"]):
            raise RequestError(f"{where}: messages must be a list of objects", param="prompts")
        token_ids = _chat(tokenizer, template, value["messages"])
    else:
        text = value.get("prompt") if isinstance(value, dict) and set(value) == {"prompt"} else value
        if not isinstance(text, str):
            raise RequestError(
                f'{where} must be a string, {{"prompt": text}} or {{"messages": [...]}}', param="prompts"
            )
        token_ids = tokenizer.encode(text)
    if not token_ids:
        raise RequestError(f"{where} has no tokens", param="prompts")
    return token_ids


def _chat(tokenizer: Tokenizer, template: ChatTemplate, messages: list[dict[str, Any]]) -> list[int]:
    text = template.render(flatten_messages(messages), add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)
