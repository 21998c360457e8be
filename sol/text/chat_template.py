"""Chat templates with Hugging Face's meaning: jinja2 in a sandbox, with the functions that templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils

from sol.errors import RequestError, TokenizerError
from sol.models.fields import read_json_object
from sol.models.gguf import GGUFFile
from sol.models.source import ModelFiles
from sol.text.gguf_tokenizer import gguf_special_tokens
from sol.text.special_tokens import named_special_tokens
from sol.text.template_sandbox import MAX_SOURCE_CHARACTERS, TemplateEnvironment, within_limits


class ChatTemplate:
    """A compiled template. Safe to share between threads.

    `special_tokens` (`bos_token`, `eos_token` …) are variables of the template. `origin` says in errors where the
    template is from. Raises `TokenizerError` when the template is not valid jinja2.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str = "the chat template") -> None:
        self.source = source
        self._variables = {"tools": None, "documents": None, **special_tokens}
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise TokenizerError(
                f"{origin} has {len(source)} characters; a template may have {MAX_SOURCE_CHARACTERS}",
                param="model",
            )
        try:
            with within_limits():
                self._template = _ENVIRONMENT.from_string(source)
        except Exception as error:  # compiling nests as deep as the template does, and computes its constants
            line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise TokenizerError(
                f"{origin} is not a valid jinja2 template{line}: {kind}{error}", param="model"
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt for a conversation. Encode it with `add_special_tokens=False`: it has the model's special tokens.

        Keys of a message whose value is None count as absent, as in Hugging Face. `kwargs` are more variables
        (`tools`, `enable_thinking` …).

        Raises `RequestError` when the template refuses the messages or fails on them.
        """
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        variables = {**self._variables, **kwargs}
        try:
            with within_limits():
                text = self._template.render(messages=present, add_generation_prompt=add_generation_prompt, **variables)
        except _Refused as error:
            raise RequestError(f"messages: the model's chat template refuses them: {error}", param="messages") from None
        except Exception as error:  # a template is the model author's program: whatever it raises, the request fails
            raise RequestError(
                f"messages: the model's chat template failed on them: {type(error).__name__}: {error}",
                param="messages",
            ) from error
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"messages: {text[error.start]!r} is half of a surrogate pair; send whole characters",
                    param="messages",
                ) from None
        return text


def load_chat_template(files: ModelFiles) -> ChatTemplate | None:
    """The model's chat template: of the GGUF file, or chat_template.jinja, or the one in tokenizer_config.json.
    None when it has none. Of several named ones it is `default`.

    Raises `TokenizerError` for a template that cannot be compiled, or named ones without a default.
    """
    if files.gguf is not None:
        metadata = GGUFFile(files.gguf).metadata
        source = metadata.get("tokenizer.chat_template")
        if source is None:
            return None
        if not isinstance(source, str):
            raise TokenizerError(f"{files.gguf}: tokenizer.chat_template must be a string", param="model")
        origin = f"{files.gguf}: tokenizer.chat_template"
        return ChatTemplate(source, gguf_special_tokens(metadata, str(files.gguf)), origin)
    if files.chat_template is not None:
        try:
            source = files.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{files.chat_template} cannot be read: {error}", param="model") from error
        return ChatTemplate(source, named_special_tokens(files), str(files.chat_template))
    if files.tokenizer_config is None:
        return None
    origin = f"{files.tokenizer_config}: chat_template"
    source = _default_of(read_json_object(files.tokenizer_config).get("chat_template"), origin)
    return None if source is None else ChatTemplate(source, named_special_tokens(files), origin)


def _default_of(value: Any, origin: str) -> str | None:
    """tokenizer_config.json holds one template, or a list of `{"name": …, "template": …}`."""
    if value is None or isinstance(value, str):
        return value
    named = {}
    for entry in value if isinstance(value, list) else [value]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                named[name] = template
            case _:
                raise TokenizerError(
                    f"{origin} must be a string, or a list of objects with name and template", param="model"
                )
    if "default" not in named:
        raise TokenizerError(
            f"{origin} has the templates {', '.join(sorted(named)) or '(none)'}, but none named default; "
            "put the one to use into chat_template.jinja",
            param="model",
        )
    return named["default"]


class _Refused(jinja2.TemplateError):
    """`raise_exception` was called."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training. Here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance attribute)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """A namespace whose names cannot reach Python's internals."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a namespace has no attribute {name!r}: it begins with an underscore"
            )
        super().__setitem__(name, value)


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(format: str) -> str:  # noqa: A002  (templates may pass it by name)
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes what HTML would misread; a model is not a browser."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> TemplateEnvironment:
    environment = TemplateEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


_ENVIRONMENT = _environment()
