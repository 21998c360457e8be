"""The jinja2 in which chat templates run: a sandbox that also bounds what a template may take of time and memory.

A template comes with a model, so whoever made the model wrote it, and what it is given comes from clients. jinja2's
sandbox keeps it from Python's internals; it lets `{{ 'x' * 10**12 }}` take the machine's memory, and six loops inside
one another its time. Here

- nothing that a template makes is larger than `MAX_CHARACTERS`: what could grow (`*`, `+`, `~`, `%`, `replace`, `join`,
  widths and indents, lists of lists) is measured before it is made;
- loops, calls and filters count, and end after `MAX_SECONDS` of the thread's own time, so that how busy the machine is
  decides nothing.

Filters that make web pages (`urlize`, `xmlattr`, `striptags`, `wordwrap`, `pprint`) and `lipsum` are not there.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final, NoReturn

import jinja2.exceptions
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

MAX_CHARACTERS: Final = 8 * 2**20
"""Of a text, or of what a list or an object holds: about two million tokens."""
MAX_SOURCE_CHARACTERS: Final = 2**20
"""Of a template; real ones have some ten thousand."""
MAX_SECONDS: Final = 5.0
"""Of processor time, to render once. A thousand messages take some milliseconds."""

_NODE: Final = 64
"""Characters that a value counts as besides its text: what a Python object takes."""
_MAX_BITS: Final = 4096
_MAX_WIDTH: Final = 10_000
"""Of a number in a format."""
_MAX_INDENT: Final = 64
_STEPS_BETWEEN_LOOKS: Final = 32

_WEB_FILTERS: Final = ("urlize", "xmlattr", "striptags", "wordwrap", "pprint")
_MULTIPLYING_FILTERS: Final = frozenset({"indent", "center", "batch", "slice"})
"""Whose results may be as large as one argument times another."""
_TEXT_FILTERS: Final = frozenset(
    {"string", "tojson", "escape", "e", "forceescape", "format", "replace", "trim", "upper", "lower", "capitalize",
     "title", "truncate", "urlencode", "wordcount", "safe", "join"}
)  # fmt: skip
"""Which make a text of whatever they are given."""


class TemplateLimitError(jinja2.exceptions.SecurityError):
    """A template takes more time or memory than one may."""


class _Budget(threading.local):
    """What is left for the rendering in this thread."""

    steps = 0

    def __init__(self) -> None:
        self.deadline: float | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        outer = self.deadline
        if outer is None:
            self.deadline = time.thread_time() + MAX_SECONDS
        try:
            yield
        finally:
            self.deadline = outer

    def step(self) -> None:
        self.steps += 1
        if self.steps % _STEPS_BETWEEN_LOOKS == 0 and self.deadline is not None:
            self.look()

    def look(self) -> None:
        if self.deadline is not None and time.thread_time() > self.deadline:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:g} s")


_budget: Final = _Budget()
within_limits = _budget.running
"""A context in which templates are compiled or rendered, for `MAX_SECONDS` together."""


def _too_large() -> NoReturn:
    raise TemplateLimitError(f"it makes a text or a list of more than {MAX_CHARACTERS} characters")


def _check_size(size: float) -> None:
    if size > MAX_CHARACTERS:
        _too_large()


def _weigh(*values: Any) -> int:
    """How large values are, each reference to one counted. Raises `TemplateLimitError` beyond the limit."""
    total = 0
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, (str, bytes)):
            total += len(value)
        elif isinstance(value, (list, tuple, set, frozenset)):
            total += _NODE * len(value)
            if total <= MAX_CHARACTERS:
                waiting.extend(value)
        elif isinstance(value, Mapping):
            total += 2 * _NODE * len(value)
            if total <= MAX_CHARACTERS:
                waiting.extend(value.keys())
                waiting.extend(value.values())
        elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise TemplateLimitError(f"it makes a number of more than {_MAX_BITS} bits")
        if total > MAX_CHARACTERS:
            _too_large()
    return total


def _weighed(value: Any) -> Any:
    if type(value) is str:
        _check_size(len(value))
    elif isinstance(value, (str, bytes, list, tuple, set, frozenset, dict, int)):
        _weigh(value)
    return value


class _Counted:
    """What a loop goes through, each round of it counted."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        step = _budget.step
        for value in self._values:
            step()
            yield value

    def __len__(self) -> int:
        return len(self._values)


def _concat(values: tuple[Any, ...]) -> str:
    """`a ~ b`"""
    _weigh(*values)
    return jinja2.runtime.markup_join(values)


def _join_output(pieces: Iterable[str]) -> str:
    """Everything that is written goes through this, a macro's output and a block's too."""
    size = 0
    kept = []
    for piece in pieces:
        size += len(piece)
        if size > MAX_CHARACTERS:
            _too_large()
        kept.append(piece)
    return "".join(kept)


class _Bounding(jinja2.visitor.NodeTransformer):
    """Puts `_Counted`, `_concat` and `_weighed` where jinja2 would compute without asking the environment."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_counted")
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filter(jinja2.nodes.Tuple(node.nodes, "load", lineno=node.lineno), "_concat")

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:
        return self._made(node)

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:
        return self._made(node)

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:
        return self._made(node) if node.ctx == "load" else node

    def _made(self, node: Any) -> jinja2.nodes.Node:
        self.generic_visit(node)
        items = node.items
        if all(isinstance(item, jinja2.nodes.Const) for item in items):
            return node  # type: ignore[no-any-return]  # the source is bounded
        return _filter(node, "_weighed")


def _filter(node: Any, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    """`str.format`, with the widths that its fields come to."""

    def __init__(self, environment: Any, **options: Any) -> None:
        super().__init__(environment, **options)
        self._size = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        if any(int(number) > _MAX_WIDTH for number in re.findall(r"[0-9]{1,4000}", format_spec)):
            raise TemplateLimitError(f"a width in a format is more than {_MAX_WIDTH}")
        self._size += _weigh(value)
        _check_size(self._size)
        text: str = super().format_field(value, format_spec)
        return text


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with limits. Compile and render `within_limits`."""

    intercepted_binops: ClassVar[frozenset[str]] = frozenset({"*", "**", "%", "+"})  # type: ignore[misc]

    def __init__(self, **options: Any) -> None:
        # The optimiser computes a constant once for each expression around it, and again for each of those.
        super().__init__(finalize=_finalize, optimized=False, **options)
        self.concat = _join_output  # type: ignore[method-assign]
        for name in _WEB_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters = {name: _bounded(name, function) for name, function in self.filters.items()}
        self.filters |= {"_counted": _Counted, "_concat": _concat, "_weighed": _weighed}

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = _bounded(name, function)

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_Bounding().visit(source), *args, **options)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        _BINARY_CHECKS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes)):
            args = _check_method(owner, getattr(__obj, "__name__", ""), args, kwargs)
        elif isinstance(__obj, jinja2.runtime.Macro):
            _weigh(args, kwargs)
        return _weighed(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        owner, is_map = value.__self__, value.__name__ == "format_map"

        def bounded(*args: Any, **kwargs: Any) -> str:
            named = args[0] if is_map and len(args) == 1 else kwargs
            text: str = _Formatter(self).vformat(str(owner), () if is_map else args, named)
            return type(owner)(text) if type(owner) is not str else text

        return bounded


def _finalize(value: Any) -> Any:
    """Of whatever is written."""
    return value if isinstance(value, str) else _weighed(value)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at what it is given, and at what it gives."""
    # jinja2 passes an environment or a context first, where the filter asks for it.
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def filtered(*given: Any, **kwargs: Any) -> Any:
        _budget.step()
        value, *others = given[skipped:]
        if name in _MULTIPLYING_FILTERS:
            _check_size((_weigh(value) or 1) * max(1, *(_amount(v) for v in (*others, *kwargs.values())), 1))
        elif name == "replace":
            _check_replace(str(_weighed(value)), *map(str, (*others, *kwargs.values())))
        elif name == "join":
            items = list(value) if not isinstance(value, (str, Mapping, jinja2.runtime.Undefined)) else value
            separator = others[0] if others else kwargs.get("d", "")
            count = len(items) if not isinstance(items, jinja2.runtime.Undefined) else 0
            _check_size(_weigh(items) + count * _weigh(separator))
            given = (*given[:skipped], items, *others)
        elif name == "format":
            _check_percent(value, (others, kwargs))
        elif name == "round" and max((abs(_amount(v)) for v in (*others, *kwargs.values())), default=0) > _MAX_INDENT:
            raise TemplateLimitError("it rounds to too many places")
        elif name == "tojson" and max((_amount(v) for v in (*others, *kwargs.values())), default=0) > _MAX_INDENT:
            raise TemplateLimitError(f"it indents JSON by more than {_MAX_INDENT}")
        if name in _TEXT_FILTERS:
            _weigh(value)
        return _weighed(function(*given, **kwargs))

    return filtered


def _amount(value: Any) -> int:
    """A number as it is, a text by its length."""
    if isinstance(value, (list, tuple)):
        return max(map(_amount, value), default=0)
    return len(value) if isinstance(value, str) else int(value) if isinstance(value, (int, float)) else 0


def _check_multiply(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise TemplateLimitError(f"it makes a number of more than {_MAX_BITS} bits")
        return
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int):
            _check_size((_weigh(value) + _NODE * (not isinstance(value, (str, bytes)))) * max(0, times))


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_BITS:
        raise TemplateLimitError(f"it makes a number of more than {_MAX_BITS} bits")


def _check_percent(left: Any, right: Any) -> None:
    if not isinstance(left, (str, bytes)):
        return
    text = left if isinstance(left, str) else left.decode("latin-1")
    if re.search(r"%[^a-zA-Z%]*(\*|[0-9]{5})", text):
        raise TemplateLimitError(f"a width in a format is more than {_MAX_WIDTH}, or not a number")
    _check_size(len(text) + text.count("%") * (_weigh(right) + _NODE))


def _check_plus(left: Any, right: Any) -> None:
    if type(left) is str is type(right):  # most of what templates add
        _check_size(len(left) + len(right))
    elif isinstance(left, (str, bytes, list, tuple)):
        _weigh(left, right)


_BINARY_CHECKS: Final[Mapping[str, Callable[[Any, Any], None]]] = {
    "*": _check_multiply,
    "**": _check_power,
    "%": _check_percent,
    "+": _check_plus,
}


def _check_replace(text: str | bytes, old: Any = "", new: Any = "", *_count: Any) -> None:
    if isinstance(old, type(text)) and isinstance(new, type(text)):
        times = text.count(old) if old else len(text) + 1  # type: ignore[arg-type]
        _check_size(len(text) + times * len(new))


def _check_method(owner: str | bytes, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Look at the methods of texts whose results may be larger than what they are given; returns the arguments."""
    given = (*args, *kwargs.values())
    if name == "replace":
        _check_replace(owner, *args)
    elif name == "join" and args:
        items = args[0] if isinstance(args[0], str) else list(args[0])
        _check_size(_weigh(items) + len(owner) * len(items))
        return (items, *args[1:])
    elif name in ("center", "ljust", "rjust", "zfill"):
        _check_size(max((value for value in given if isinstance(value, int)), default=0))
    elif name == "expandtabs":
        tabs = owner.count("\t" if isinstance(owner, str) else b"\t")  # type: ignore[arg-type]
        _check_size(len(owner) + tabs * max((value for value in given if isinstance(value, int)), default=8))
    elif name in ("translate", "maketrans"):
        raise TemplateLimitError(f"{name} is not allowed here")
    return args
