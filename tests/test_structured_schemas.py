"""60 random JSON Schemas: what is accepted is kept, and is the same text with speculation as without."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest

from sol import LLM, SamplingParams, SpeculationParams
from sol.errors import RequestError
from sol.grammar import Grammar

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from json_schemas import Case, SchemaWriter
from structured import FORMATS


@pytest.fixture(scope="module")
def llm(talking_llama: Path) -> LLM:
    return LLM(str(talking_llama), max_model_len=512, max_num_seqs=16, kv_cache_memory_bytes=2**24)


@pytest.fixture(scope="module")
def accepted(llm: LLM) -> list[tuple[Case, Grammar]]:
    """Of 60 schemas, those that are supported; each other one is refused for the keyword that it has on purpose."""
    writer, found = SchemaWriter(2026), []
    for _ in range(60):
        case = writer.case()
        grammar = Grammar.json_schema(case.schema)
        if case.unsupported is None:
            llm.check_grammar(grammar)
            found.append((case, grammar))
        else:
            with pytest.raises(RequestError, match="JSON Schema is not supported") as error:
                llm.check_grammar(grammar)
            assert case.unsupported in error.value.message
    assert 45 < len(found) < 60
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_satisfy_their_schemas(llm: LLM, accepted: list[tuple[Case, Grammar]], temperature: float) -> None:
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=440, grammar=grammar)
        for seed, (_, grammar) in enumerate(accepted)
    ]
    prompts = ["Fill in the form:"] * len(params)
    outputs = [found.outputs[0] for found in llm.generate(prompts, params, use_tqdm=False)]
    finished = 0
    for (case, _), output in zip(accepted, outputs, strict=True):
        if output.finish_reason == "stop":
            finished += 1
            checker = jsonschema.Draft202012Validator(case.schema, format_checker=FORMATS)
            checker.validate(json.loads(output.text))
    assert finished >= 0.9 * len(accepted)
    some = slice(0, 12)
    off = SpeculationParams(enabled=False)
    plain = llm.generate(prompts[some], params[some], speculation=off, use_tqdm=False)
    assert [found.outputs[0].token_ids for found in plain] == [output.token_ids for output in outputs[some]]
