"""Command-line flags that several commands share: the engine's, derived from `EngineConfig`, and sampling's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping
from fractions import Fraction
from typing import Any

from sol.config import EngineConfig, FlagOption, flag_options
from sol.errors import ConfigError
from sol.sampling_params import SamplingParams

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_NOT_FLAGS = frozenset({"model", "skip_tokenizer_init"})
"""The model has its own rules (`add_model_argument`); every command speaks text, so it needs a tokenizer."""

_JSON_EXAMPLE = """an object in quotes, like '{"method": "ngram"}'"""

_SAMPLING_HELP = {
    "max_tokens": "most tokens to generate",
    "temperature": "0 always takes the likeliest token; larger is more varied",
    "top_p": "draw from the likeliest tokens that together have this probability",
    "top_k": "draw from so many likeliest tokens; 0: from all",
    "min_p": "leave out tokens less likely than this share of the likeliest one",
    "presence_penalty": "-2 to 2: makes tokens that were generated before less likely, once",
    "frequency_penalty": "-2 to 2: the same, for each time they were generated",
    "repetition_penalty": "above 1: makes tokens of prompt and output less likely",
    "min_tokens": "least tokens to generate before an end token or a stop string counts",
    "ignore_eos": "do not stop at the model's end token",
}


def whole_number(text: str) -> int:
    """An integer, also as vLLM writes large ones: 8k is 8,000, 8K is 8,192; m, g, t and M, G, T likewise."""
    number, suffix = (text[:-1], text[-1]) if text and text[-1] in _SUFFIXES else (text, "")
    try:
        value = Fraction(number) * _SUFFIXES[suffix] if suffix else Fraction(int(number))
    except (ValueError, ZeroDivisionError):
        value = Fraction(1, 2)
    if value.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return value.numerator


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error}); write {_JSON_EXAMPLE}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object; write {_JSON_EXAMPLE}")
    return value


_READERS: dict[type, Callable[[str], Any]] = {int: whole_number, dict: json_object}
"""Of flags that take more than Python's own constructor does."""


def add_model_argument(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    """MODEL, as a positional argument (unless a command has others) and as `--model`."""
    option = next(option for option in flag_options() if option.name == "model")
    text = f"{option.help} (default: {option.default})"
    if positional:
        parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
        parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same, as a flag")
    else:
        parser.add_argument("--model", dest="model_flag", metavar="MODEL", help=text)


def chosen_model(args: argparse.Namespace, otherwise: str | None = None) -> str:
    """The model that was named, or `otherwise`, or the default. Raises `ConfigError` if two different ones were
    named."""
    positional: str | None = getattr(args, "model", None)
    flag: str | None = args.model_flag
    if positional is not None and flag is not None and positional != flag:
        raise ConfigError(f"model was given twice: {positional!r} and --model {flag!r}; give one", param="model")
    chosen = flag if positional is None else positional
    if chosen is None:
        chosen = otherwise
    return EngineConfig().model if chosen is None else chosen


def add_engine_arguments(parser: argparse.ArgumentParser, *, only: Collection[str] = (), absent: bool = False) -> None:
    """A flag for every field of `EngineConfig`, or for those in `only`. `absent`: flags that are not given are not in
    the result either, so that a file's values show through."""
    group = parser.add_argument_group("engine")
    for option in flag_options():
        if option.name not in _NOT_FLAGS and (not only or option.name in only):
            _add_flag(group, option, absent)


def _add_flag(group: argparse._ArgumentGroup, option: FlagOption, absent: bool) -> None:
    default = argparse.SUPPRESS if absent else option.default
    text = option.help.replace("%", "%%")
    if option.default is not None:
        text += f" (default: {option.default})"
    if option.type is bool:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, default=default, help=text)
        return
    name = "JSON" if option.type is dict else option.name.rpartition("_")[2].upper()
    group.add_argument(
        option.flag,
        type=_READERS.get(option.type, option.type),
        default=default,
        choices=option.choices or None,
        metavar=None if option.choices else name,
        help=text,
    )


def engine_config(args: argparse.Namespace, file: Mapping[str, Any] | None = None) -> EngineConfig:
    """Flags stand above the options of a `file`. Raises `ConfigError` for values that cannot work."""
    given = {option.name: getattr(args, option.name) for option in flag_options() if hasattr(args, option.name)}
    given["model"] = chosen_model(args, (file or {}).get("model"))
    return EngineConfig(**{**engine_options(file or {}), **given})


def engine_options(file: Mapping[str, Any]) -> dict[str, Any]:
    """Those options of a file that are the engine's, their values as the flags would have them: `8k` is a number
    there, too. Raises `ConfigError` for values of another type."""
    options: dict[str, Any] = {}
    for option in flag_options():
        if option.name in _NOT_FLAGS - {"model"} or option.name not in file:
            continue
        value = file[option.name]
        if value is False and "off" in option.choices:
            value = "off"  # YAML 1.1 has that word for false
        elif option.type is int and isinstance(value, str):
            try:
                value = whole_number(value)
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"{option.name}: {error}", param=option.name) from None
        wanted = (int, float) if option.type is float else option.type
        fits = isinstance(value, wanted) and (option.type is bool or not isinstance(value, bool))
        if not fits and not (value is None and option.default is None):
            kind = {int: "a whole number", float: "a number", bool: "true or false", dict: "a mapping"}
            allowed = f"one of {', '.join(option.choices)}" if option.choices else kind.get(option.type, "a string")
            raise ConfigError(f"{option.name} must be {allowed}, not {value!r:.80}", param=option.name)
        options[option.name] = value
    return options


def add_sampling_arguments(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    """Flags for `SamplingParams`, whose defaults hold where `defaults` names no other. `--seed` is the engine's."""
    group = parser.add_argument_group("sampling")
    plain = SamplingParams()
    for name, text in _SAMPLING_HELP.items():
        default = defaults.get(name, getattr(plain, name))
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            group.add_argument(flag, action="store_true", default=default, help=text)
            continue
        shown = "until the model's length" if default is None else default
        group.add_argument(
            flag,
            type=float if isinstance(default, float) else int,
            default=default,
            metavar="N",
            help=f"{text} (default: {shown})",
        )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end here; may be given again")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Raises `RequestError` for values that cannot be honoured."""
    return SamplingParams(stop=args.stop, **{name: getattr(args, name) for name in _SAMPLING_HELP})
