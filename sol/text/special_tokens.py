"""The named special tokens (`bos_token`, `eos_token` …) of a Hugging Face directory."""

from __future__ import annotations

from typing import Any, Final

from sol.errors import TokenizerError
from sol.models.fields import read_json_object
from sol.models.source import ModelFiles

NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def named_special_tokens(files: ModelFiles) -> dict[str, str]:
    """By name, the text of each special token that tokenizer_config.json names, or else special_tokens_map.json.

    Raises `TokenizerError` for an entry that is neither a string nor an added token's object.
    """
    named: dict[str, str] = {}
    for path in (files.special_tokens_map, files.tokenizer_config):
        if path is None:
            continue
        values = read_json_object(path)
        for name in NAMES:
            value: Any = values.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if text is None:
                continue
            if not isinstance(text, str):
                raise TokenizerError(f"{path}: {name} must be a string or an added token, not {value!r}", param="model")
            named[name] = text
    return named
