from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data.record_tokenizer_fixture import write_vocabulary
from text_files import files_in

from sol.errors import RequestError, TokenizerError
from sol.models.source import ModelFiles
from sol.text.chat_template import ChatTemplate, load_chat_template

USER = [{"role": "user", "content": "Hi"}]
TALK = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Grüße, 世界 \"quoted\" 'single'"},
    {"role": "assistant", "content": "  spaced  ", "tool_calls": None},
    {"role": "user", "content": "line\nbreak"},
]
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "blocks on their own lines": """{{ bos_token }}
{%- for message in messages %}
    {% if message.role == 'system' %}
        [S] {{ message.content | trim }}
    {% elif loop.last %}
        [L] {{ message.content }}{{ eos_token }}
    {% else %}
        [M] {{ message['content'] }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
A:
{%- endif %}
""",
    "no tools": "{% if tools is not none %}{{ tools | tojson }}{% endif %}{% if documents %}d{% endif %}{{ tools }}",
    "tojson": (
        "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|"
        "{{ {'b': 1, 'a': 'é<&'} | tojson(sort_keys=true) }}"
        "{{ messages | tojson(separators=(',', ':')) }}"
    ),
    "namespace": (
        "{% set ns = namespace(found=false, system='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.found = true %}{% set ns.system = m.content %}{% endif %}{% endfor %}{{ ns.found }}{{ ns.system }}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
        "{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 1 %}{{ m.content }}{{ x }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ x }}{% endfor %}"
    ),
    "absent keys": "{% for m in messages %}{{ 'tool_calls' in m }}{{ m.tool_calls is defined }}{% endfor %}",
    "undefined": "{{ nothing }}{% if nothing is defined %}x{% endif %}{{ unk_token }}",
    "extra": "{{ enable_thinking }}{{ custom.key }}",
    "slices": "{% set loop_messages = messages[1:] %}{{ loop_messages[-1]['content'].split('\n')[0].upper() }}",
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_what_transformers_does(name: str, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    extra = {"enable_thinking": False, "custom": {"key": "v"}}
    messages = [{key: value for key, value in message.items() if value is not None} for message in TALK]
    (theirs,), _ = render_jinja_template(
        [messages], chat_template=TEMPLATES[name], add_generation_prompt=add_generation_prompt, **SPECIAL, **extra
    )
    ours = ChatTemplate(TEMPLATES[name], SPECIAL).render(TALK, add_generation_prompt=add_generation_prompt, **extra)
    assert ours == theirs


def test_keys_that_are_none_count_as_absent() -> None:
    template = ChatTemplate(TEMPLATES["absent keys"], {})
    assert template.render([{"role": "assistant", "content": "x", "tool_calls": None}]) == "FalseFalse"


def test_the_default_models_template(smollm2: ModelFiles) -> None:
    template = load_chat_template(smollm2)
    assert template is not None
    assert template.render(USER) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not template.render(USER, add_generation_prompt=False).endswith("assistant\n")


def test_the_date() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}-{{ strftime_now(format='%m') }}", {}).render(USER)
    assert len(text) == len("2026-01")
    assert text[:2] == "20"


def test_a_template_may_refuse_messages() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate.') }}", {})
    with pytest.raises(RequestError, match=r"messages: .* refuses them: Roles must alternate\.") as caught:
        template.render(USER)
    assert caught.value.param == "messages"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ messages[0].missing.deeper }}", "UndefinedError"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "OverflowError"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "SecurityError"),
        ("{% set ns = namespace(__class__=1) %}", "SecurityError"),
        ("{% include 'x' %}", "TypeError"),
    ],
)
def test_a_template_that_fails_fails_the_request(source: str, error: str) -> None:
    with pytest.raises(RequestError, match=f"messages: the model's chat template failed on them: {error}") as caught:
        ChatTemplate(source, {}).render(USER)
    assert caught.value.param == "messages"


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "x", "name": None}]
    ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}).render(messages)
    assert messages == [{"role": "user", "content": "x", "name": None}]


def test_half_a_surrogate_pair_is_the_requests_mistake() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(RequestError, match="half of a surrogate pair") as caught:
        template.render([{"role": "user", "content": "\ud83d"}])
    assert caught.value.param == "messages"
    assert template.render([{"role": "user", "content": "😀"}]) == "😀"


def test_a_template_that_cannot_be_compiled() -> None:
    with pytest.raises(TokenizerError, match=r"the chat template is not a valid jinja2 template in line 2: "):
        ChatTemplate("x\n{% if %}", {})
    with pytest.raises(TokenizerError, match="generation"):
        ChatTemplate("{% generation %}", {})


def config(directory: Path, **values: Any) -> ModelFiles:
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    return files_in(directory)


def test_from_tokenizer_config(tmp_path: Path) -> None:
    files = config(tmp_path, chat_template="{{ bos_token }}{{ messages[0].content }}", bos_token={"content": "<s>"})
    template = load_chat_template(files)
    assert template is not None
    assert template.render(USER) == "<s>Hi"


def test_of_several_named_templates_the_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    template = load_chat_template(config(tmp_path, chat_template=named))
    assert template is not None
    assert template.render(USER) == "d"


def test_the_templates_own_file_comes_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file{{ eos_token }}", encoding="utf-8")
    template = load_chat_template(config(tmp_path, chat_template="config", eos_token="</s>"))
    assert template is not None
    assert template.render(USER) == "file</s>"


def test_no_template(tmp_path: Path) -> None:
    assert load_chat_template(files_in(tmp_path)) is None
    assert load_chat_template(config(tmp_path, bos_token="<s>")) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "chat_template must be a string, or a list of objects with name and template"),
        ([{"name": "x"}], "chat_template must be a string, or a list of objects"),
        (
            [{"name": "rag", "template": "r"}, {"name": "tool_use", "template": "t"}],
            "templates rag, tool_use, but none",
        ),
        ([], r"templates \(none\), but none named default"),
        ("{% if %}", "tokenizer_config.json: chat_template is not a valid jinja2 template in line 1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        load_chat_template(config(tmp_path, chat_template=value))


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja cannot be read"):
        load_chat_template(files_in(tmp_path))


def gguf_files(path: Path, metadata: dict[str, object]) -> ModelFiles:
    write_vocabulary(path, metadata)
    return ModelFiles(name="test", root=path.parent, load_format="gguf", gguf=path)


def test_gguf_without_a_template(tmp_path: Path) -> None:
    files = gguf_files(tmp_path / "none.gguf", {"tokenizer.ggml.tokens": ["a"]})
    assert load_chat_template(files) is None


def test_gguf_with_something_else_for_a_template(tmp_path: Path) -> None:
    files = gguf_files(tmp_path / "odd.gguf", {"tokenizer.chat_template": ["a"]})
    with pytest.raises(TokenizerError, match=r"odd.gguf: tokenizer.chat_template must be a string"):
        load_chat_template(files)
