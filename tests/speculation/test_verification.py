"""What `sol verify` does: it finds nothing where nothing is wrong, and finds verifiers that are wrong."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from looping_llama import EOS, VOCAB, save_looping_llama
from sampling_statistics import chi_square_limit

from sol import assemble
from sol.assemble import build_core
from sol.config import EngineConfig
from sol.engine.client import InProcessClient
from sol.errors import ConfigError, ContextLengthError, RequestError
from sol.runner import model_runner
from sol.sampling.sampler import SampledToken
from sol.speculation.propose.ngram import NgramProposer
from sol.speculation.verify import VerifyRow, rules, verify
from sol.verification import Checks, Prompt, Report, law, read_prompts, run_checks
from sol.verification.report import Law
from sol.verification.session import Session

PROMPTS = [Prompt("loop", [5, 6, 7, 8] * 5), Prompt("other", [(3 * i * i + i) % VOCAB for i in range(33)])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_looping_llama(tmp_path_factory.mktemp("looping_llama")))


@pytest.fixture(autouse=True)
def _measure_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "_MEASURING_SECONDS", 0.0)


def start(config: EngineConfig) -> InProcessClient:
    return InProcessClient(build_core(config, progress=False))


def checks(model: str, speculative: dict[str, Any], *, prompts: Sequence[Prompt] = PROMPTS, **options: Any) -> Checks:
    engine = {"max_model_len": 192, "kv_cache_memory_bytes": 4 << 20, "enable_prefix_caching": True}
    ours = {name: options.pop(name) for name in ("tolerance", "must_fit") if name in options}
    return Checks(
        config=EngineConfig(model=model, speculative_config=speculative, **(engine | options)),
        prompts=prompts,
        law_prompt=[5, 6, 7, 8] * 4,
        follow_up=[1, 2],
        eos_token_ids=[EOS],
        quick=True,
        **({"must_fit": True} | ours),
    )


NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4}


def test_nothing_is_found_where_nothing_is_wrong(model: str) -> None:
    report = run_checks(checks(model, {"method": "ngram+suffix", "prompt_lookup_min": 1}), start)
    assert report.problems == []
    assert report.num_errors == report.num_near_ties == 0
    names = {(cell.prefix_cache, cell.company, cell.drafter, cell.sampling, cell.turn) for cell in report.cells}
    for cache, company in ((False, "alone"), (False, "neighbours"), (True, "alone"), (True, "neighbours")):
        for drafter in ("ngram", "suffix", "ngram+suffix"):
            for sampling in ("greedy", "seeded"):
                assert (cache, company, drafter, sampling, 1) in names
            assert not cache or (cache, company, drafter, "greedy", 2) in names
    for cell in report.cells:
        assert cell.num_tokens >= cell.num_requests > 0
        assert 0 <= cell.num_accepted_tokens <= cell.num_draft_tokens
        assert cell.drafter == "none" or cell.num_steps + cell.num_accepted_tokens >= cell.num_tokens
        assert (cell.num_draft_tokens > 0) == (cell.drafter != "none") or cell.drafter == "as configured"
        assert cell.prefix_cache or cell.num_cached_tokens == 0
        assert cell.num_cached_tokens > 0 or cell.turn == 1
    assert report.law is not None
    assert 100 <= report.law.num_samples <= 1000  # as many as there was time for
    assert report.law.num_draft_tokens > report.law.num_accepted_tokens > 0
    assert report.law.plain_p_value is None, "nothing needed a second look"
    assert [speed.prompt for speed in report.speeds] == ["loop", "other"]
    assert all(speed.speedup > 0 for speed in report.speeds)


def trusting(logits: torch.Tensor, rows: Sequence[VerifyRow], method: Any) -> list[list[SampledToken]]:
    """A verifier that takes the first draft for right."""
    results = verify(logits, rows, method)
    return [
        [SampledToken(row.draft_token_ids[0]), *result[1:]] if row.draft_token_ids else result
        for row, result in zip(rows, results, strict=True)
    ]


def test_a_verifier_that_believes_drafts_is_found_out(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "verify", trusting)
    report = run_checks(checks(model, NGRAM), start)
    assert not report.holds
    assert "differ from plain decoding's" in report.problems[0]
    assert report.num_near_ties == 0
    wrong = {cell.sampling for cell in report.cells if cell.num_errors}
    assert wrong == {"greedy", "seeded"}
    for cell in report.cells:
        assert cell.drafter != "none" or not cell.differences, "plain decoding is right"
        for difference in cell.differences:
            assert difference.expected != difference.found
            assert difference.gap is not None
            assert difference.gap > report.tolerance
    assert report.law is not None
    assert not report.law.holds
    assert report.law.p_value < 1e-6
    assert report.law.plain_p_value is not None
    assert report.law.plain_p_value > 1e-6


def test_what_differs_by_less_than_the_tolerance_is_a_near_tie(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "verify", trusting)
    report = run_checks(checks(model, NGRAM, tolerance=1e6, enable_prefix_caching=False), start)
    assert report.num_errors == 0
    assert report.num_near_ties > 0
    assert not any("plain decoding's" in problem for problem in report.problems)


def test_methods_that_keep_the_law_and_not_the_tokens_are_compared_where_they_must_agree(model: str) -> None:
    wanted = checks(model, NGRAM | {"verify_method": "block"}, prompts=PROMPTS[:1], enable_prefix_caching=False)
    report = run_checks(wanted, start)
    assert report.problems == []
    assert {cell.sampling for cell in report.cells} == {"greedy"}
    assert report.law is not None
    assert report.law.verify_method == "block"


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_a_method_that_does_not_keep_the_law_is_found_out(
    model: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def test() -> Law:
        engine = start(checks(model, NGRAM | {"verify_method": method, "controller": "fixed"}).config)
        session = Session(engine, [EOS])
        return law.check_law(
            session, PROMPTS[1].token_ids, verify_method=method, num_samples=2000, seconds=60.0, seed=0
        )

    right = test()
    assert right.holds
    assert right.num_samples == 2000
    assert right.num_draft_tokens > right.num_accepted_tokens > 0
    # The token in place of a rejected draft sampled from p, not from the residual.
    monkeypatch.setattr(rules, "residual", lambda p, *_: p)
    wrong = test()
    assert not wrong.holds
    assert wrong.p_value < law.SIGNIFICANCE
    assert wrong.plain_p_value is not None
    assert wrong.plain_p_value > law.SIGNIFICANCE, "plain decoding is right"


def test_a_drafter_that_drafts_nothing_is_not_verified(model: str) -> None:
    wanted = checks(
        model, {"method": "ngram", "prompt_lookup_min": 64, "prompt_lookup_max": 64}, prompts=[Prompt("short", [9])]
    )
    assert run_checks(replace(wanted, law_prompt=[9]), start).problems == [
        "ngram drafted nothing for these prompts, so nothing is known of it: give prompts it can draft for with "
        "--prompts"
    ]


def test_a_drafter_that_fails_is_not_verified(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**9))
    propose = NgramProposer.propose

    def sometimes(self: NgramProposer, rows: Any) -> Any:
        if next(calls) == 20:
            raise RuntimeError("broken")
        return propose(self, rows)

    monkeypatch.setattr(NgramProposer, "propose", sometimes)
    report = run_checks(checks(model, NGRAM, enable_prefix_caching=False), start)
    assert report.problems == ["ngram failed while it drafted (failures: 1); the engine's log says why"]
    assert report.num_errors == 0


def test_what_cannot_be_verified(model: str) -> None:
    with pytest.raises(ConfigError, match="speculation is off: there is nothing to compare"):
        run_checks(replace(checks(model, NGRAM), config=EngineConfig(model=model, speculation="off")), start)
    long = [Prompt("line 3", [5] * 180)]
    with pytest.raises(
        ContextLengthError, match="line 3 has 180 tokens, and 32 are to be generated, but max_model_len"
    ):
        run_checks(checks(model, NGRAM, prompts=long), start)
    report = run_checks(checks(model, NGRAM, prompts=long, must_fit=False, enable_prefix_caching=False), start)
    assert report.problems == []


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Words:
    """As much of a tokenizer as reading prompts takes: a token for each word."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]


class Template:
    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        return " ".join([*(message["content"] for message in messages), "answer:"])


def read(path: Path, template: Any = None) -> list[Prompt]:
    return read_prompts(path, Words(), lambda: template)  # type: ignore[arg-type]


def test_prompts_from_a_file(tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text('one three\n\n{"prompt": "as it is"}\n')
    assert read(text) == [Prompt("line 1", [3, 5]), Prompt("line 3", [10, 3, 2, 4])]
    lines = tmp_path / "prompts.jsonl"
    values = ["a bc", {"prompt": "def"}, {"messages": [{"role": "user", "content": "go on"}]}]
    lines.write_text("\n".join(json.dumps(value) for value in values))
    assert [prompt.token_ids for prompt in read(lines, Template())] == [[1, 2], [3], [2, 2, 7]]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.txt", "\n \n", "has no prompts"),
        ("p.txt", b"\xff\xfe", "cannot be read"),
        ("p.jsonl", '"fine"\n{broken', "p.jsonl, line 2 is not JSON"),
        ("p.jsonl", "[1, 2]", "line 1 must be a string"),
        ("p.jsonl", '{"prompt": 5}', "line 1 must be a string"),
        ("p.jsonl", '{"prompt": "a", "temperature": 1}', "line 1 must be a string"),
        ("p.jsonl", '{"messages": "hello"}', "messages must be a list"),
        ("p.jsonl", '{"messages": [{"role": "nobody", "content": "a"}]}', "role must be one of"),
        ("p.jsonl", '""', "line 1 has no tokens"),
    ],
)
def test_prompts_that_cannot_be_read_are_named(tmp_path: Path, name: str, content: str | bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(RequestError, match=says):
        read(tmp_path / name, Template())


def test_prompts_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot be read: .*No such file"):
        read(tmp_path / "none.txt")
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    with pytest.raises(RequestError, match="the model has no chat template"):
        read(tmp_path / "p.jsonl")


# ── statistics ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("degrees", [2, 4, 10, 80])
@pytest.mark.parametrize("statistic", [0.1, 1.0, 9.0, 18.3, 79.0, 150.0, 700.0])
def test_the_tail_of_chi_square_has_a_closed_form_for_even_degrees(degrees: int, statistic: float) -> None:
    half = statistic / 2
    exact = math.exp(-half) * math.fsum(half**i / math.factorial(i) for i in range(degrees // 2))
    assert law.chi_square_tail(statistic, degrees) == pytest.approx(exact, rel=1e-9)


def test_the_tail_of_chi_square_for_odd_degrees() -> None:
    assert law.chi_square_tail(3.841458820694124, 1) == pytest.approx(0.05, rel=1e-9)
    assert law.chi_square_tail(11.070497693516351, 5) == pytest.approx(0.05, rel=1e-9)
    assert 3e-10 < law.chi_square_tail(chi_square_limit(31), 31) < 3e-9, "an approximation of it"
    assert law.chi_square_tail(0.0, 5) == law.chi_square_tail(3.0, 0) == 1.0


def sample(probabilities: dict[tuple[int, ...], float], count: int, seed: int) -> Counter[tuple[int, ...]]:
    return Counter(random.Random(seed).choices(list(probabilities), list(probabilities.values()), k=count))


def test_samples_of_the_law_pass_and_others_do_not() -> None:
    right = {(i,): 2.0**-i for i in range(1, 20)} | {(20,): 2.0**-19}
    wrong = right | {(1,): 0.5 + 0.06, (2,): 0.25 - 0.06}
    passed = 0
    for seed in range(200):
        observed, expected = law.merged(sample(right, 2000, seed), right)
        assert sum(observed) == 2000
        assert sum(expected) == pytest.approx(2000)
        assert min(expected) >= 5.0 - 1e-9
        passed += law.goodness_of_fit(observed, expected) > 0.1
        found, bound = law.distance(observed, expected, 1e-6)
        assert found <= bound
    assert 160 <= passed <= 198, "p-values are uniform"
    observed, expected = law.merged(sample(wrong, 2000, 0), right)
    assert law.goodness_of_fit(observed, expected) < 1e-6
    assert law.homogeneity(sample(right, 2000, 1), sample(right, 2000, 2)) > 1e-3
    assert law.homogeneity(sample(right, 2000, 1), sample(wrong, 2000, 2)) < 1e-4


def test_what_the_law_holds_impossible_is_counted_with_the_rare() -> None:
    observed, expected = law.merged(Counter({(1,): 60, (7,): 40}), {(1,): 1.0})
    assert (observed, expected) == ([100], [100.0])
    observed, expected = law.merged(Counter({(1,): 50, (7,): 50}), {(1,): 0.9, (2,): 0.1})
    assert (observed, expected) == ([50, 50], pytest.approx([90.0, 10.0]))


def test_the_verdict_on_a_device_whose_arithmetic_wavers() -> None:
    report = Report(model="m", device="d", dtype="bfloat16", drafters=[], verify_method="coupled", controller="fixed",
                    num_speculative_tokens=1, tolerance=0.1, quick=True)  # fmt: skip
    one = Law(verify_method="rejection", num_tokens=4, top_k=3, temperature=2.0, p_value=1e-9, significance=1e-6,
                  distance=0.01, distance_bound=0.05)  # fmt: skip
    for plain, same, holds in ((None, None, False), (0.2, 1e-9, False), (1e-9, 1e-9, False), (1e-9, 0.2, True)):
        one.plain_p_value, one.same_p_value = plain, same
        assert one.holds is holds
        report.law, report.problems = one, []
        report.conclude()
        assert report.holds is holds
