"""Templates that a hostile model would bring: each ends with an error of its own, soon and with little memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sol.errors import RequestError, TokenizerError
from sol.text import template_sandbox
from sol.text.chat_template import ChatTemplate
from sol.text.template_sandbox import MAX_CHARACTERS, MAX_SOURCE_CHARACTERS

MESSAGES = [{"role": "user", "content": "Hi"}]
_LOOPS = "".join(f"{{% for i{k} in range(99999) %}}" for k in range(4)) + "BODY" + "{% endfor %}" * 4
_DOUBLE = "{%% set ns = namespace(x=%s) %%}{%% for i in range(64) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x%s }}"
LARGE = {
    "times": "{{ 'x' * 10**10 }}",
    "times of a list": "{{ ([1] * 10**9)|length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "power of a variable": "{{ (messages|length + 9) ** (10 ** 9) }}",
    "factorial": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent with a star": "{{ '%*d' % (1000000000, 1) }}",
    "percent of many": "{{ ('%s' * 5000) % (('x' * 5000,) * 5000) }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format with a width inside": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format of many": "{{ ('{0}' * 5000).format('x' * 5000) }}",
    "format_map": "{{ '{x:1000000000}'.format_map({'x': 1}) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "expandtabs": "{{ '\t\t'.expandtabs(10**9) }}",
    "replace": "{{ ('x' * 9999).replace('x', 'y' * 9999) }}",
    "replace nothing": "{{ ('x' * 9999).replace('', 'y' * 9999) }}",
    "replace filter": "{{ ('x' * 9999)|replace('x', 'y' * 9999) }}",
    "join": "{{ ('y' * 9999).join('x' * 9999) }}",
    "join filter": "{{ ('x' * 9999)|join('y' * 9999) }}",
    "join of a generator": "{{ range(9999)|map('string')|join('y' * 9999) }}",
    "center filter": "{{ 'x'|center(10**10) }}",
    "indent filter": "{{ ('x\n' * 9999)|indent(10**6) }}",
    "indent of JSON": "{{ messages|tojson(indent=10**9) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "round": "{{ 1.5|round(10**9, 'ceil') }}",
    "range": "{{ range(10**12)|list }}",
    "translate": "{{ ('x' * 9999).translate({120: 'y' * 9999}) }}",
    "plus": _DOUBLE % ("'x'", "ns.x + ns.x", ""),
    "plus of lists": _DOUBLE % ("[1]", "ns.x + ns.x", "|length"),
    "tilde": _DOUBLE % ("'x'", "ns.x ~ ns.x", ""),
    "block": "{% set x = 'x' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 64 + "{{ x }}",
    "lists of lists": _DOUBLE % ("[1]", "[ns.x, ns.x]", ""),
    "objects of objects": _DOUBLE % ("[1]", "{'a': ns.x, 'b': ns.x}", "|tojson"),
    "dict()": _DOUBLE % ("[1]", "dict(a=ns.x, b=ns.x)", "|string"),
    "lists that are compared": (
        "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(64) %}{% set ns.a = [ns.a, ns.a] %}"
        "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}"
    ),
    "arguments of macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}{% else %}{{ varargs }}{% endif %}{% endmacro %}"
        "{{ f(64) }}"
    ),
    "output": "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 99 }}{% endfor %}{% endfor %}",
    "source again and again": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
}  # fmt: skip
ENDLESS = {
    "loops": _LOOPS.replace("BODY", ""),
    "loops with a variable": _LOOPS.replace("BODY", "{{ loop.length }}"),
    "loops over lists": "".join(f"{{% for i{k} in [1, 2, 3, 4, 5, 6, 7, 8, 9] %}}" for k in range(14))
    + "{% endfor %}" * 14,
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "calls": _LOOPS.replace("BODY", "{{ 'x'.upper() }}"),
    "filters": _LOOPS.replace("BODY", "{{ range(9999)|sum }}"),
    "recursive loop": (
        "{% for i in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}"
    ),
}  # fmt: skip


@pytest.fixture
def memory() -> Iterator[None]:
    """Fails for what takes more than 1 GiB on top of what is there: a limit that the process could not pass."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", LARGE)
def test_what_would_be_too_large_is_not_made(name: str, memory: None) -> None:
    with pytest.raises(RequestError, match="chat template failed on them") as error:
        ChatTemplate(LARGE[name], {}).render(MESSAGES)
    assert "MemoryError" not in error.value.message
    assert len(error.value.message) < 1000


@pytest.mark.parametrize("name", ENDLESS)
def test_what_would_not_end_is_ended(name: str, memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.1)
    template = ChatTemplate(ENDLESS[name], {})
    begin = time.thread_time()
    with pytest.raises(RequestError, match=r"more than 0\.1 s|more than \d+ characters"):
        template.render(MESSAGES)
    assert time.thread_time() - begin < 5.0  # of this thread, whatever else runs


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 2000 + "]" * 2000 + " }}",
        "{{ " + "not " * 5000 + "x }}",
        "{{ x" + ".a" * 20_000 + " }}",
        "{% if a %}" * 500 + "{% endif %}" * 500,
        "{% for a in b %}" * 60 + "{% endfor %}" * 60,
        "{{ 'x'|urlize }}",
        "x" * (MAX_SOURCE_CHARACTERS + 1),
    ],
    ids=["parentheses", "brackets", "not", "attributes", "ifs", "loops", "filter", "long"],
)
def test_what_cannot_be_compiled_is_an_error_of_the_model(source: str) -> None:
    with pytest.raises(TokenizerError, match="the chat template") as error:
        ChatTemplate(source, {})
    assert error.value.param == "model"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}:{{ m.content }}{% endfor %}", "1/1:Hi"),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", "role=user;content=Hi;"),
        ("{% for x in messages|map(attribute='role') %}{{ x }}{{ loop.last }}{% endfor %}", "userTrue"),
        ("{% for x in nothing %}{{ x }}{% else %}none{% endfor %}", "none"),
        ("{{ 'a' ~ 1 ~ none ~ [1, 'b'] }}", "a1None[1, 'b']"),
        ("{{ '%s-%d' % ('a', 3) }}{{ '%s'|format('b') }}{{ '{:>3}{x}'.format(1, x=2) }}", "a-3b  12"),
        ("{{ ['a', 'b']|join(', ') }}{{ 'a b'.split(' ')|join }}{{ ', '.join(['c', 'd']) }}", "a, babc, d"),
        ("{{ 'a.b'.replace('.', '-') }}{{ 'a.b'|replace('.', '+') }}", "a-ba+b"),
        ("{{ 2 * 3 }}{{ 'ab' * 2 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ [1] + [2] }}{{ -2 * 'x' }}", "6abab10243[1, 2]"),
        ("{{ {'a': [1, {'b': none}]}|tojson }}{{ [1]|tojson(indent=2) }}", '{"a": [1, {"b": null}]}[\n  1\n]'),
        ("{% macro f(x, y=2) %}<{{ x }}{{ y }}{{ caller() }}>{% endmacro %}{% call f(1) %}!{% endcall %}", "<12!>"),
        ("{% set ns = namespace(i=0) %}{% for x in range(5) %}{% set ns.i = ns.i + x %}{% endfor %}{{ ns.i }}", "10"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x|upper }}{{ x|length }}", "A12"),
        ("{{ 'a\nb'|indent(2) }}{{ 1.26|round(1) }}{{ [3, 1]|sort|first }}{{ 'a'|center(3) }}", "a\n  b1.31 a "),
        ("{{ messages[0]['content'][:1] }}{{ (1, 2)[1] }}{{ 'b' in ['a', 'b'] }}", "H2True"),
    ],
)  # fmt: skip
def test_what_templates_do_is_as_it_was(source: str, text: str) -> None:
    assert ChatTemplate(source, {}).render(MESSAGES) == text


def test_constants_are_computed_once() -> None:
    """And not, while the template is compiled, once for each filter that follows, and again for each of those."""
    assert ChatTemplate("{{ 'ba'" + "|sort|join" * 90 + " }}", {}).render(MESSAGES) == "ab"


def test_long_conversations_are_rendered() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if loop.index == messages|length or m.content %}<|{{ m.role }}|>{{ m.content|trim }}"
        "{% endif %}{% endfor %}",
        {},
    )
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{i} " + "word " * 100} for i in range(4000)]
    assert len(template.render(messages)) > 2_000_000
    with pytest.raises(RequestError, match="characters"):
        template.render([{"role": "user", "content": "x" * MAX_CHARACTERS}])
