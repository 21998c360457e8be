"""A vocabulary of single characters, for grammars on tiny models: 0 is `<s>`, 1 ends a text, the rest is ASCII."""

from __future__ import annotations

import functools

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from sol.grammar import Grammar
from sol.text.grammar import GrammarCompiler
from sol.text.tokenizer import Tokenizer

VOCAB = 97
EOS = 1
_FIRST = 2
"""Of the characters, which are those from the blank to the tilde"""


@functools.cache
def character_tokenizer() -> Tokenizer:
    vocabulary = {"<s>": 0, "</s>": EOS, "\u0120": _FIRST}
    vocabulary |= {chr(ord("!") + i): _FIRST + 1 + i for i in range(94)}
    assert len(vocabulary) == VOCAB
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: (character_tokenizer(), [EOS]), vocab_size=VOCAB)


def ids(text: str) -> list[int]:
    return character_tokenizer().encode(text, add_special_tokens=False)


def text(token_ids: list[int]) -> str:
    return character_tokenizer().decode(token_ids)


NUMBER = Grammar.regex(r"-?[1-9][0-9]{0,6}")
"""Between one and eight characters, with an end that may come early."""
RECORD = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
WORDS = Grammar.lark('start: word (" " word)*\nword: /[a-c]{1,3}/')
"""Without an end of its own."""
