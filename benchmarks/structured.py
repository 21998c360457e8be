"""Whether structured output keeps what it promises, and what it costs.

500 random JSON Schemas (`json_schemas.py`): those with a keyword that Sol does not support must be refused, and what
comes of all others must satisfy them, by the `jsonschema` package with formats checked: at T = 0 and T = 1, with
speculation and without, whose tokens must be the same. On a model that talks nonsense, which leaves all to the grammar,
and on a real one. An output that was cut by `max_tokens` counts as neither right nor wrong; few may be.

Then the masks: microseconds a token and row on the real model's vocabulary, and what a grammar that allows nearly
everything costs a stream, beside the same stream without one.
"""

from __future__ import annotations

import datetime
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import jsonschema
import torch
from common import Report, arguments
from json_schemas import Case, SchemaWriter
from tiny_server import write_model

from sol import LLM, SamplingParams, SpeculationParams
from sol.config import DEFAULT_MODEL
from sol.errors import RequestError
from sol.grammar import Grammar
from sol.llm import CompletionOutput
from sol.sampling.grammar import GrammarState, masks
from sol.sampling.processing import SamplingRow
from sol.text.grammar import GrammarCompiler

PROMPT = "<|im_start|>user\nFill in the form. Answer as JSON.<|im_end|>\n<|im_start|>assistant\n"
ANYTHING = Grammar.regex(r"(?s:.)*")
FORMATS = jsonschema.FormatChecker()


@FORMATS.checks("date-time", raises=ValueError)
def _is_date_time(value: object) -> bool:
    """By RFC 3339, which has leap seconds."""
    if not isinstance(value, str):
        return True
    return datetime.datetime.fromisoformat(value.upper().replace(":60", ":59")).tzinfo is not None


@FORMATS.checks("time", raises=ValueError)
def _is_time(value: object) -> bool:
    return _is_date_time(f"2000-01-01T{value}") if isinstance(value, str) else True


@dataclass
class Count:
    accepted: int = 0
    finished: int = 0
    valid: int = 0
    same: int = 0
    tokens: int = 0


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    report = Report("structured", args.quick)
    writer = SchemaWriter(args.seed)
    cases = [writer.case() for _ in range(60 if args.quick else 500)]
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        nonsense = LLM(directory, load_format="dummy", max_model_len=512, max_num_seqs=32, kv_cache_memory_bytes=2**26)
        _schemas(report, "random weights", nonsense, cases)
    real = LLM(DEFAULT_MODEL, max_model_len=512, max_num_seqs=16, kv_cache_memory_bytes=2**29)
    _schemas(report, "SmolLM2-135M", real, cases[:: 6 if args.quick else 5])
    report.section()
    _masks(report, real, cases, args.quick)
    report.section()
    _streams(report, real, args.quick)
    return report.finish(args.json)


def _schemas(report: Report, model: str, llm: LLM, cases: Sequence[Case]) -> None:
    accepted: list[tuple[Case, Grammar]] = []
    wrongly = 0
    for case in cases:
        grammar = Grammar.json_schema(case.schema)
        try:
            llm.check_grammar(grammar)
        except RequestError:
            wrongly += case.unsupported is None
        else:
            accepted.append((case, grammar))
            wrongly += case.unsupported is not None
    report.at_most(f"{model}: schemas refused or accepted wrongly", wrongly, 0)
    for temperature in (0.0, 1.0):
        params = [
            SamplingParams(temperature=temperature, seed=number, max_tokens=440, grammar=grammar)
            for number, (_, grammar) in enumerate(accepted)
        ]
        prompts = [PROMPT] * len(params)
        began = time.perf_counter()
        outputs = [found.outputs[0] for found in llm.generate(prompts, params, use_tqdm=False)]
        seconds = time.perf_counter() - began
        off = SpeculationParams(enabled=False)
        plain = [found.outputs[0] for found in llm.generate(prompts, params, speculation=off, use_tqdm=False)]
        count = _count(accepted, outputs, plain)
        drafted = sum(c.num_accepted_tokens for o in outputs if o.speculation for c in o.speculation.drafters.values())
        report.row(
            model=model, temperature=temperature, schemas=len(cases), accepted=len(accepted), finished=count.finished,
            valid=count.valid, tokens=count.tokens, accepted_drafts=drafted, tokens_per_second=count.tokens / seconds,
        )  # fmt: skip
        name = f"{model}, T = {temperature:g}"
        report.at_least(f"{name}: valid of those that finished", count.valid / max(1, count.finished), 1.0)
        report.at_least(f"{name}: finished of those accepted", count.finished / len(accepted), 0.95)
        report.at_least(f"{name}: same tokens without speculation", count.same / len(accepted), 1.0)


def _count(
    accepted: Sequence[tuple[Case, Grammar]], outputs: Sequence[CompletionOutput], plain: Sequence[CompletionOutput]
) -> Count:
    count = Count()
    for (case, _), output, alone in zip(accepted, outputs, plain, strict=True):
        count.tokens += len(output.token_ids)
        count.same += output.token_ids == alone.token_ids
        if output.finish_reason != "stop":
            continue
        count.finished += 1
        try:
            validator = jsonschema.Draft202012Validator(case.schema, format_checker=FORMATS)
            validator.validate(json.loads(output.text))
            count.valid += 1
        except (ValueError, jsonschema.ValidationError) as error:
            print(f"INVALID {output.text!r}\n  of {case.text}\n  {str(error).splitlines()[0]}", file=sys.stderr)
    return count


def _masks(report: Report, llm: LLM, cases: Sequence[Case], quick: bool) -> None:
    """Along the model's own outputs, of `rows` requests at once."""
    tokenizer = llm.get_tokenizer()
    grammars = [Grammar.json_schema(case.schema) for case in cases if case.unsupported is None][:32]
    params = [SamplingParams(temperature=1.0, seed=7, max_tokens=100, grammar=grammar) for grammar in grammars]
    texts = [found.outputs[0].token_ids[:-1] for found in llm.generate([PROMPT] * len(params), params, use_tqdm=False)]
    vocab_size = tokenizer.vocab_size
    compiler = GrammarCompiler(lambda: (tokenizer, tokenizer.eos_token_ids), vocab_size=vocab_size)
    logits = torch.zeros(32, vocab_size)
    for rows, drafts in itertools.product((1, 8, 32), (0, 4)):
        if quick and rows == 32:
            continue
        times: list[float] = []
        states = [GrammarState(lambda g=grammar: compiler.compile(g)) for grammar in grammars[:rows]]  # type: ignore[misc]
        batch = [
            SamplingRow(SamplingParams(grammar=grammar), 0, 0, [], [], list(tokenizer.eos_token_ids), state)
            for grammar, state in zip(grammars, states, strict=False)
        ]
        for state in states:
            state.after([])  # compiled before a clock runs
        for place in range(60):
            following = []
            for row, text in zip(batch, texts, strict=False):
                row.output_token_ids = text[:place]
                following.append(text[place : place + drafts])
            began = time.perf_counter()
            masks(logits, batch, following)
            times.append((time.perf_counter() - began) * 1e6 / rows)
        report.row(rows=rows, drafts=drafts, mask_us_per_row=statistics.median(times), worst_us_per_row=max(times))
        if drafts == 0:
            report.at_most(f"mask of {rows} rows, median µs a row", statistics.median(times), 500.0)


def _streams(report: Report, llm: LLM, quick: bool) -> None:
    """Tokens a second of 8 streams, in turn with and without a grammar that allows any text."""
    seconds: dict[str, list[float]] = {"no grammar": [], "any text": []}
    off = SpeculationParams(enabled=False)
    tokens = 64
    for turn in range(2 * (3 if quick else 9)):
        name = ("no grammar", "any text")[turn % 2]
        # The end token is put off for both: they do the same work.
        grammar = ANYTHING if name == "any text" else None
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, grammar=grammar)
        began = time.perf_counter()
        llm.generate([PROMPT] * 8, params, speculation=off, use_tqdm=False)
        seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        report.row(streams=8, grammar=name, tokens_per_second=8 * tokens / median)
    ratio = medians["any text"] / medians["no grammar"]
    report.at_most("8 streams: time with a grammar over time without", ratio, 1.25)


if __name__ == "__main__":
    sys.exit(main())
