"""Inputs that `server_fuzz.py` begins with, and the words that its formats are made of."""

from __future__ import annotations

import struct
from typing import Final

MESSAGES: Final = (
    b'[{"role":"system","content":"S"},{"role":"user","content":"Hi"},{"role":"assistant","content":null,'
    b'"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{\\"a\\":[1,2]}"}}]},'
    b'{"role":"tool","tool_call_id":"c","content":"4"}]'
)
TEMPLATES: Final = (
    b"{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m.content|trim }}<|im_end|>{% endfor %}"
    b"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    b"{%- set ns = namespace(n=0, s='') -%}{%- for m in messages if m.role == 'user' -%}{%- set ns.n = ns.n + 1 -%}"
    b"{%- set ns.s = ns.s ~ m.content.split(' ')[-1].strip('x').upper() -%}{%- endfor -%}{{ ns.s * ns.n }}",
    b"{% macro f(x, n=2) %}{% if n %}{{ f(x, n - 1) }}{{ x|tojson(indent=2) }}{% endif %}{% endmacro %}"
    b"{{ f(messages) }}{{ '%s-%3d'|format('a', 5) }}{{ '{0:>5}'.format(1) }}",
    b"{% for a, b in messages[0].items() recursive %}{{ loop.index ~ a }}{% endfor %}{{ range(10)|join(', ') }}"
    b"{{ messages|map(attribute='role')|list|sort|unique|join }}{{ raise_exception('no') }}",
    b"{% if messages[0].role is defined and not messages[0].x %}{{ messages|length ** 2 }}{% elif x %}y{% else %}z"
    b"{% endif %}{% set a %}b{{ strftime_now('%Y') }}{% endset %}{{ a|replace('b', 'cc')|center(9)|indent(2) }}",
)


ANSWERS: Final = (
    b'Sure. <tool_call>\n{"name": "look_up", "arguments": {"a": [1, -2.5e3, null, "\\u00e9}"]}}\n</tool_call> Done',
    b'<|python_tag|>{"name": "f", "parameters": {"x": {"y": true}}}; {"type": "function", "name": "f"}',
    b'[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "a.b-c", "arguments": {"k": "v"}, "id": "123456789"}]',
    b'[TOOL_CALLS]look_up[CALL_ID]abc[ARGS]{"q": "x"}[TOOL_CALLS]f{"a": 1}',
    b'[{"name": "f", "parameters": {"a": 1}}, {"name": "look_up", "parameters": {}}]',
    b"<think>\nHm, <tool_call> or not?\n</think>\n\nNo.<think>again</think>",
)


# A GGUF file.


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _field(key: str, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value


def gguf_file() -> bytes:
    """A model of one layer with a tokenizer of 270 tokens, all of it zeros."""

    def number(key: str, value: int) -> bytes:
        return _field(key, 4, struct.pack("<I", value))

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abcdefghi", "ab"]
    kinds = [2, 3, 3] + [6] * 256 + [1] * 11
    fields = [
        _field("general.architecture", 8, _string("llama")),
        number("llama.block_count", 1), number("llama.embedding_length", 32), number("llama.feed_forward_length", 32),
        number("llama.attention.head_count", 2), number("llama.attention.head_count_kv", 1),
        number("llama.context_length", 64),
        _field("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
        _field("llama.rope.freq_base", 6, struct.pack("<f", 1e4)),
        _field("tokenizer.ggml.model", 8, _string("llama")),
        _field("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, len(tokens)) + b"".join(map(_string, tokens))),
        _field("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, len(tokens)) + struct.pack("<f", -1) * len(tokens)),
        _field("tokenizer.ggml.token_type", 9,
               struct.pack("<IQ", 5, len(kinds)) + b"".join(struct.pack("<i", kind) for kind in kinds)),
        number("tokenizer.ggml.bos_token_id", 1), number("tokenizer.ggml.eos_token_id", 2),
        _field("tokenizer.ggml.add_bos_token", 7, b"\1"),
        _field("tokenizer.chat_template", 8, _string("{{ messages[0].content }}")),
    ]  # fmt: skip
    shapes = {
        "token_embd.weight": (32, len(tokens)), "output_norm.weight": (32,), "blk.0.attn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32), "blk.0.attn_k.weight": (32, 16), "blk.0.attn_v.weight": (32, 16),
        "blk.0.attn_output.weight": (32, 32), "blk.0.ffn_norm.weight": (32,), "blk.0.ffn_gate.weight": (32, 32),
        "blk.0.ffn_up.weight": (32, 32), "blk.0.ffn_down.weight": (32, 32),
    }  # fmt: skip
    infos, offset = b"", 0
    for name, shape in shapes.items():
        is_matrix = len(shape) == 2
        infos += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        infos += struct.pack("<IQ", 8 if is_matrix else 0, offset)
        size = shape[0] * shape[1] // 32 * 34 if is_matrix else shape[0] * 4
        offset += -(-size // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(fields)) + b"".join(fields) + infos
    return head + bytes(-len(head) % 32 + offset)


GRAMMARS: Final = (
    b'0{"type":"object","properties":{"a":{"enum":["x",1,null]},"b":{"type":"array","items":{"$ref":"#/$defs/c"},'
    b'"maxItems":3}},"required":["a"],"additionalProperties":false,"$defs":{"c":{"type":"integer","minimum":-5}}}',
    b'0{"anyOf":[{"type":"string","pattern":"^[a-z]{1,4}$"},{"type":"number","exclusiveMaximum":9.5},'
    b'{"type":"string","format":"date-time"},{"const":{"a":[true]}}]}',
    b'0{"type":["string","null"],"minLength":2,"maxLength":40}',
    b'0{"allOf":[{"type":"object","patternProperties":{"^x":{"type":"boolean"}}},{"minProperties":1}]}',
    b"1[a-z]+(foo|ba?r){2,5}\\d*[^\\s]",
    b'2["yes","no","per\\u0027haps"]',
    b'3start: greeting " " NAME\ngreeting: "hello" | /h[ei]y+/i\nNAME: /[A-Z][a-z]{1,8}/\n%ignore /\\s+/',
    b'4root ::= item ("," item)*\nitem ::= [a-z]+ | "(" root ")"\n',
)


BODIES: Final = (
    b'0{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"Hi"}]}],"temperature":0.5,"n":2,'
    b'"stop":["a","b"],"logit_bias":{"5":-100},"stream":true,"stream_options":{"include_usage":true},"seed":-1,'
    b'"logprobs":true,"top_logprobs":3,"max_completion_tokens":5,"response_format":{"type":"json_object"}}',
    b'0{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":'
    b'"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"c","content":"4"}],"tools":[{"type":"function",'
    b'"function":{"name":"f","parameters":{"type":"object"}}}],"tool_choice":{"type":"function","function":'
    b'{"name":"f"}},"speculation":{"enabled":false},"priority":1,"service_tier":"flex","cache_salt":"s"}',
    b'1{"prompt":[[1,2],[3]],"max_tokens":0,"echo":true,"logprobs":5,"best_of":1,"top_p":1e-3,"top_k":-1,"min_p":0,'
    b'"frequency_penalty":2,"presence_penalty":-2,"repetition_penalty":1.5,"min_tokens":0,"stop_token_ids":[2]}',
    b'2{"input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"Hi"}]}],"store":false,'
    b'"include":["message.output_text.logprobs"],"top_logprobs":2,"text":{"format":{"type":"json_schema","name":"a",'
    b'"schema":{}}},"metadata":{"a":"b"},"truncation":"disabled","background":false}',
    b'3{"messages":[{"role":"user","content":"Hi"}],"add_special_tokens":true,"return_token_strs":true,'
    b'"chat_template_kwargs":{"enable_thinking":false}}',
    b'4{"tokens":[1,2,3]}',
)


STREAMS: Final = (
    b'\x05data: {"id":"c","choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}],"usage":null}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}\n\ndata: [DONE]\n\n',
    b'\x09event: response.completed\r\ndata: {"type":"response.completed","response":{"usage":{"input_tokens":1,'
    b'"output_tokens":2}}}\r\n\r\n',
    b'\x02: comment\n\ndata: {"error":{"message":"no","type":"x","param":null,"code":null}}\n\n',
    b'\x11data: {"choices":[{"text":"a","finish_reason":"stop","token_ids":[1],"speculation":{"segments":[{"tokens":1,'
    b'"origin":"target"}]}}], "usage": {"completion_tokens":1}}\n\n',
)


_JSON: Final = rb'{ } [ ] " : , null true -1 1e999 \u0041 \ud800'.split()
_TEMPLATE: Final = rb"""
    {{ }} {% %} {# #} -%} for endfor if endif set endset macro endmacro call filter recursive messages loop namespace(
    range(9) |join |tojson |list .items() [' '] ** *9999 ~ % 'x' self .replace( .format( __class__
"""
_CALLS: Final = rb"""
    <tool_call> </tool_call> <|python_tag|> [TOOL_CALLS] [ARGS] [CALL_ID] <think> </think> "name" "arguments"
    "parameters" "f" look_up ;
"""
_GRAMMAR: Final = rb"""
    "type" "object" "$ref":"#" "anyOf" "allOf" "pattern" "enum" "format" "minItems":999999 "maxLength":999999999 (?=
    {1,99999} [^ | * ::= start: root
"""
_FIELDS: Final = rb"""
    "messages" "content" "role" "tools" "stop" "n" "prompt" "input" "logit_bias" "response_format" "schema"
    99999999999999999999 NaN -Infinity
"""
_EVENTS: Final = rb"""
    data: [DONE] event: "usage" "choices":[] "error" "finish_reason"
"""

WORDS: Final[dict[str, list[bytes]]] = {
    "templates": [*_TEMPLATE.split(), b" in ", b"x "],
    "tool_calls": [*_JSON, *_CALLS.split(), b" ", b"\n", "é".encode()],
    "gguf": [
        *(struct.pack("<I", kind) for kind in range(14)),
        *(struct.pack("<Q", number) for number in (0, 1, 2**31, 2**63, 2**64 - 1)),
        *b"llama gemma3 general.architecture tokenizer.ggml. .weight".split(),
    ],
    "grammars": [*_JSON, *_GRAMMAR.split()],
    "bodies": [*_JSON, *_FIELDS.split(), b"\xff", b"\0"],
    "streams": [*_JSON, *_EVENTS.split(), b"data: ", b"\n\n", b"\r\n\r\n", b"\r", b": "],
}
"""By target."""
