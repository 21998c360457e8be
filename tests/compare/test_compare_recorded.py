"""Recorded runs: how they are paired, what cannot be said of them, and the forms of other tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sol.bench import RequestRecord, Stage, summarise
from sol.bench.load import ClosedLoop
from sol.bench.result import to_json
from sol.bench.session import Measured
from sol.compare import Answer, Plan
from sol.compare.recorded import RecordedRun, compare_runs, read_run
from sol.compare.texts import compare_texts
from sol.errors import ConfigError

DATA = Path(__file__).parent / "data"


def run_of(
    latencies: Sequence[float], *, keys: Sequence[str] | None = None, tool: str = "sol bench", **options: Any
) -> RecordedRun:
    answers = [
        Answer(key=keys[i] if keys else f"p{i}", place=i, e2e=value, ttft=value / 10, output_tokens=10)
        for i, value in enumerate(latencies)
    ]
    return RecordedRun(path=Path("x.json"), tool=tool, name="load", answers=answers, **options)


def noise(seed: int, n: int, sigma: float = 0.1) -> np.ndarray[Any, Any]:
    prompts = np.random.default_rng(0).lognormal(0, 0.8, size=n)  # prompts differ far more than servers do
    return prompts * np.random.default_rng(seed).lognormal(0, sigma, size=n)


def test_pairing_finds_what_two_samples_do_not_show() -> None:
    a, b = run_of(noise(1, 200).tolist()), run_of((1.1 * noise(2, 200)).tolist())
    paired, notes = compare_runs(a, b, Plan())
    assert paired.verdict == "worse"
    assert paired.paired
    assert paired.primary.num_blocks == 30
    assert paired.primary.ratio == pytest.approx(1.1, rel=0.03)
    assert any("one after the other" in note for note in notes)
    other = run_of((1.1 * noise(2, 200)).tolist(), keys=[f"q{i}" for i in range(200)])
    unpaired, notes = compare_runs(a, other, Plan())
    assert not unpaired.paired
    assert unpaired.verdict == "cannot tell"
    assert unpaired.primary.low is not None
    assert unpaired.primary.low < 1.1
    assert any("per-prompt differences" in note for note in notes)


def test_two_samples_that_are_far_apart_are_told_apart() -> None:
    other = run_of((3 * noise(2, 200)).tolist(), keys=[f"q{i}" for i in range(200)])
    comparison, _ = compare_runs(run_of(noise(1, 200).tolist()), other, Plan())
    assert comparison.verdict == "worse"
    assert comparison.primary.p_rank is not None
    assert comparison.primary.p_rank < 0.001
    assert comparison.effects["ttft"].ratio == pytest.approx(3, rel=0.3)


def test_recorded_runs_that_are_the_same_are_seldom_told_apart() -> None:
    false = {True: 0, False: 0}
    for seed in range(60):
        a, b = noise(2 * seed + 1, 120), noise(2 * seed + 2, 120)
        for paired in false:
            keys = None if paired else [f"q{i}" for i in range(120)]
            comparison, _ = compare_runs(run_of(a.tolist()), run_of(b.tolist(), keys=keys), Plan())
            false[paired] += comparison.verdict != "cannot tell"
    assert max(false.values()) <= 7


def test_neighbours_that_resemble_each_other_make_longer_blocks() -> None:
    rng = np.random.default_rng(3)
    drift = np.repeat(rng.normal(0, 0.3, size=10), 40)
    comparison, _ = compare_runs(
        run_of(noise(1, 400).tolist()), run_of((noise(2, 400) * np.exp(drift)).tolist()), Plan()
    )
    assert 1 <= comparison.primary.num_blocks < 15
    independent, _ = compare_runs(run_of(noise(1, 400).tolist()), run_of(noise(2, 400).tolist()), Plan())
    assert independent.primary.num_blocks == 30


def test_a_prompt_that_was_sent_again_is_paired_in_order() -> None:
    a = run_of([1.0, 2.0, 3.0, 4.0], keys=["x", "y", "x", "z"])
    b = run_of([30.0, 10.0, 20.0], keys=["y", "x", "x"])
    comparison, notes = compare_runs(a, b, Plan())
    matched = [
        (ours.e2e, theirs.e2e) for block in comparison.blocks for pair in block.pairs for ours, theirs in pair.matched()
    ]
    assert matched == [(1.0, 10.0), (2.0, 30.0), (3.0, 20.0)]
    assert any(note.startswith("1 requests of one run") for note in notes)
    assert any("too short" in note for note in notes)
    assert comparison.verdict == "cannot tell"


def test_what_recorded_runs_cannot_be_asked() -> None:
    run = run_of([1.0] * 30)
    with pytest.raises(ConfigError, match="throughput is one number a run"):
        compare_runs(run, run, Plan(metric="throughput"))
    with pytest.raises(ConfigError, match="recorded runs have those they have"):
        compare_runs(run, run, Plan(effect=0.05))


def sol_bench(path: Path, *, slow: float = 1.0, loads: int = 1) -> Path:
    measured = []
    for number in range(loads):
        load = ClosedLoop(concurrency=number + 1, num_conversations=100)
        stage = Stage(load=load.describe(), counting="estimated", started_at=0.0, closed_loop=True)
        for i in range(100):
            record = RequestRecord(i, f"p{i}", 0, float(i))
            record.started = record.connected = record.sent = float(i)
            for moment in (0.1, 0.1 + 0.4 * slow * (1 + 0.02 * ((i * 7) % 5))):
                record.times.append(i + moment)
                record.counts.append(5)
                record.characters.append(9)
            record.end = record.times[-1]
            record.completion_tokens, record.num_chunks, record.finish_reason = 10, 2, "stop"
            record.text = "odd" if slow != 1 and i == 50 else "same"
            stage.records.append(record)
        stage.load_seconds = stage.seconds = 100.0
        measured.append(Measured(load=load, stage=stage, summary=summarise(stage), cost=None))
    document = to_json(measured, endpoint={}, data={}, options={}, machine={}, packages={}, seed=0, keep_text=True)
    path.write_text(json.dumps(document))
    return path


def test_runs_of_sol_bench(tmp_path: Path) -> None:
    a, b = read_run(sol_bench(tmp_path / "a.json")), read_run(sol_bench(tmp_path / "b.json", slow=1.2))
    assert len(a.answers) == 86  # within the measured window
    comparison, notes = compare_runs(a, b, Plan(metric="tpot"))
    assert comparison.verdict == "worse"
    assert comparison.primary.ratio == pytest.approx(1.2, rel=1e-6)
    assert comparison.effects["ttft"].ratio == pytest.approx(1.0)
    assert any(note.startswith("throughput was") for note in notes)
    texts = compare_texts(comparison.blocks)
    assert texts.num_compared == 86
    assert [one.key for one in texts.differences] == ["p50"]


def test_a_file_with_several_loads_needs_a_choice(tmp_path: Path) -> None:
    path = sol_bench(tmp_path / "a.json", loads=2)
    with pytest.raises(ConfigError, match="several loads; choose one with --load: 1 at a time; 2 at a time"):
        read_run(path)
    assert read_run(path, "2 at a time").name == "2 at a time"
    with pytest.raises(ConfigError, match="has no load 'three'"):
        read_run(path, "three")


def vllm(path: Path, *, slow: float = 1.0, detailed: bool = True) -> Path:
    """As `vllm bench serve --save-result --save-detailed` writes it."""
    n = 80
    document: dict[str, Any] = {
        "date": "20260101-000000", "backend": "openai-chat", "label": None, "model_id": "m", "num_prompts": n,
        "request_rate": "inf", "duration": 40.0, "completed": n - 1, "failed": 1, "total_input_tokens": 8000,
        "total_output_tokens": 800, "request_throughput": 2.0, "output_throughput": 20.0 / slow,
        "mean_ttft_ms": 50.0, "median_ttft_ms": 50.0 * slow, "median_tpot_ms": 10.0 * slow, "median_itl_ms": 9.0,
    }  # fmt: skip
    if detailed:
        lengths = [10 + i % 7 for i in range(n)]
        wobble = [1 + 0.03 * ((i * 13) % 7) for i in range(n)]
        document |= {
            "input_lens": [100 + i for i in range(n)], "output_lens": lengths,
            "ttfts": [0.05 * slow if i else 0.0 for i in range(n)],
            "itls": [[0.01 * slow * wobble[i]] * (lengths[i] - 1) if i else [] for i in range(n)],
            "start_times": [float(n - i) for i in range(n)],
            "generated_texts": [f"text {i}" for i in range(n)],
            "errors": ["Internal Server Error", *[""] * (n - 1)],
        }  # fmt: skip
    path.write_text(json.dumps(document))
    return path


def test_runs_of_vllm_bench(tmp_path: Path) -> None:
    a, b = read_run(vllm(tmp_path / "a.json")), read_run(vllm(tmp_path / "b.json", slow=0.8))
    assert (a.tool, len(a.answers)) == ("vllm bench", 80)
    assert a.answers[0].text == "text 79"  # the first that was sent
    assert a.answers[0].e2e == pytest.approx(0.05 + 0.01 * (1 + 0.03 * ((79 * 13) % 7)) * (9 + 79 % 7))
    assert a.answers[0].tpot == pytest.approx(0.01 * (1 + 0.03 * ((79 * 13) % 7)))
    comparison, _ = compare_runs(a, b, Plan())
    assert comparison.verdict == "better"
    assert comparison.primary.ratio == pytest.approx(0.8)
    assert comparison.failures.both == 1
    assert comparison.failures.examples == {"failed": "Internal Server Error"}
    assert compare_texts(comparison.blocks).verdict == "same"


def test_totals_alone_have_medians_and_nothing_else(tmp_path: Path) -> None:
    a, b = (read_run(vllm(tmp_path / f"{slow}.json", slow=slow, detailed=False)) for slow in (1.0, 2.0))
    comparison, notes = compare_runs(a, b, Plan(metric="ttft"))
    assert comparison.primary.ratio == pytest.approx(2.0)
    assert comparison.primary.low is None
    assert comparison.effects["throughput"].ratio == pytest.approx(0.5)
    assert comparison.verdict == "cannot tell"
    assert any("--save-detailed" in note for note in notes)


def guidellm(path: Path, *, slow: float = 1.0, computed: bool = True, strategies: int = 1) -> Path:
    """As GuideLLM writes benchmarks.json; `computed`: since its version 0.4."""

    def request(i: int, failed: bool) -> dict[str, Any]:
        common: dict[str, Any] = {"request_id": f"id-{slow}-{i}", "prompt_tokens": 50 + i, "output_tokens": 20}
        if computed:
            body = {"model": f"m{slow}", "messages": [{"role": "user", "content": f"question {i}"}]}
            common |= {"type_": "generative_request_stats", "request_args": json.dumps({"body": body}),
                       "request_start_time": 1000.0 + i, "request_end_time": 1001.0 + i, "info": {}}  # fmt: skip
        else:
            common |= {"prompt": f"question {i}", "start_time": 1000.0 + i, "end_time": 1001.0 + i}
        if failed:
            return {**common, "request_latency": None, "time_to_first_token_ms": None}
        return {
            **common, "output": f"answer {i}", "request_latency": 0.5 * slow * (1 + 0.05 * (i % 3)),
            "time_to_first_token_ms": 100.0 * slow, "inter_token_latency_ms": 20.0 * slow,
            "time_per_output_token_ms": 24.0 * slow,
        }  # fmt: skip

    benchmark = {
        "config": {"strategy": {"type_": "constant"}},
        "requests": {"successful": [request(i, False) for i in range(60)], "errored": [request(60, True)],
                     "incomplete": [request(61, True)]},
    }  # fmt: skip
    path.write_text(json.dumps({"benchmarks": [benchmark] * strategies}))
    return path


@pytest.mark.parametrize("computed", [True, False])
def test_runs_of_guidellm(computed: bool, tmp_path: Path) -> None:
    a = read_run(guidellm(tmp_path / "a.json", computed=computed))
    b = read_run(guidellm(tmp_path / "b.json", slow=1.5, computed=computed))
    assert (a.name, len(a.answers)) == ("0 (constant)", 61)
    assert a.answers[3].tpot == pytest.approx(0.02)  # without the first token, as everybody else has it
    comparison, _ = compare_runs(a, b, Plan())
    assert comparison.verdict == "worse"
    assert comparison.primary.ratio == pytest.approx(1.5)
    assert comparison.failures.both == 1
    assert compare_texts(comparison.blocks).num_compared == 60
    with pytest.raises(ConfigError, match=r"choose one with --load: 0 \(constant\); 1 \(constant\)"):
        read_run(guidellm(tmp_path / "c.json", strategies=2))


@pytest.mark.parametrize("tool", ["vllm-bench-0.32.0", "guidellm-0.8.1"])
def test_what_the_tools_themselves_wrote(tool: str) -> None:
    """12 requests, two at a time, to simulated servers with steps of 20 and 30 ms, where a fifth failed. GuideLLM's
    files are without its summaries and the timings inside it; it writes of no failed request what was asked."""
    a, b = (read_run(DATA / f"{tool}-{side}.json") for side in "ab")
    for run, step in ((a, 0.02), (b, 0.03)):
        good = [answer for answer in run.answers if answer.ok]
        assert (len(run.answers), len(good)) == (12, 9 if "vllm" in tool else 8)
        assert np.median([answer.tpot or 0 for answer in good]) == pytest.approx(step, rel=0.05)
        for answer in good:
            assert answer.ttft is not None
            assert answer.tpot is not None
            assert answer.e2e == pytest.approx(answer.ttft + answer.tpot * (answer.output_tokens - 1), rel=0.05)
        assert all(answer.text for answer in good)
        assert any(
            "500" in (answer.message or "") or "Server Error" in (answer.message or "") for answer in run.answers
        )
    comparison, _ = compare_runs(a, b, Plan())
    assert comparison.paired
    assert 1.3 < (comparison.primary.ratio or 0) < 1.6
    failures = comparison.failures
    assert failures.num_requests == 12
    assert failures.both + failures.only_a == len(a.answers) - sum(answer.ok for answer in a.answers)
    texts = compare_texts(comparison.blocks)
    assert texts.num_compared >= 6
    assert texts.verdict == "same"


def test_failures_that_do_not_say_what_was_asked_are_not_lost() -> None:
    def named(fail: Sequence[int], *, unnamed: bool) -> RecordedRun:
        run = run_of([1.0] * 40, tool="GuideLLM")
        answers = [
            Answer(key="" if unnamed else one.key, place=one.place, error="failed") if one.place in fail else one
            for one in run.answers
        ]
        return RecordedRun(path=run.path, tool=run.tool, name=run.name, answers=answers)

    for fail_a, fail_b in (([1], [1]), ([1], [2]), ([], range(12)), ([3, 4], [4, 5, 6])):
        counts = [
            compare_runs(named(fail_a, unnamed=hidden), named(fail_b, unnamed=hidden), Plan())[0].failures
            for hidden in (False, True)
        ]
        assert counts[0].only_b - counts[0].only_a == counts[1].only_b - counts[1].only_a
        assert (counts[1].failed_a, counts[1].failed_b) == (len(fail_a), len(fail_b))
        assert counts[1].worse == (len(fail_b) == 12)


def test_of_two_samples_the_one_that_fails_more_often_is_worse() -> None:
    keys = [f"q{i}" for i in range(40)]
    good, other = run_of([1.0] * 40), run_of([0.5] * 40, keys=keys)
    bad = [Answer(key=one.key, place=one.place, error="timeout") if one.place < 10 else one for one in other.answers]
    failing = RecordedRun(path=other.path, tool=other.tool, name=other.name, answers=bad)
    comparison, _ = compare_runs(good, failing, Plan())
    assert not comparison.paired
    assert comparison.verdict == "worse"
    assert compare_runs(failing, good, Plan())[0].failures.worse is False


def aiperf(path: Path, *, slow: float = 1.0, named: bool = True) -> Path:
    """As AIPerf writes profile_export.jsonl."""
    lines = []
    for i in range(50):
        metadata = {"session_num": i, "x_request_id": f"{slow}-{i}", "turn_index": 0, "benchmark_phase": "profiling",
                    "conversation_id": f"session-{i}" if named else f"{slow}-{i}",
                    "request_start_ns": 10**18 + i * 10**8, "was_cancelled": False}  # fmt: skip
        metrics = {
            "input_sequence_length": {"value": 100 + i, "unit": "tokens"},
            "time_to_first_token": {"value": 40.0 * slow, "unit": "ms"},
            "request_latency": {"value": 300.0 * slow * (1 + 0.04 * (i % 4)), "unit": "ms"},
            "inter_token_latency": {"value": 5.0, "unit": "ms"},
            "inter_chunk_latency": {"value": [5.0, 5.0], "unit": "ms"},
            "output_sequence_length": {"value": 30, "unit": "tokens"},
        }
        lines.append({"metadata": metadata, "metrics": metrics, "error": None})
    lines[7] = {**lines[7], "metrics": {"error_isl": {"value": 107, "unit": "tokens"}},
                "error": {"code": 499, "type": "RequestCancellationError", "message": "cancelled"}}  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_runs_of_aiperf(tmp_path: Path) -> None:
    a, b = read_run(aiperf(tmp_path / "a.jsonl")), read_run(aiperf(tmp_path / "b.jsonl", slow=0.5))
    assert a.answers[0].e2e == pytest.approx(0.3)
    assert a.answers[7].error == "RequestCancellationError"
    comparison, _ = compare_runs(a, b, Plan())
    assert comparison.primary.ratio == pytest.approx(0.5)
    assert comparison.effects["tpot"].ratio == pytest.approx(1.0)
    # Ids of another run mean nothing; without lengths that agree there would be no pairs.
    unnamed = read_run(aiperf(tmp_path / "c.jsonl", slow=0.5, named=False))
    assert not compare_runs(a, unnamed, Plan())[0].paired
    a_unnamed = read_run(aiperf(tmp_path / "d.jsonl", named=False))
    lengths = list(a_unnamed.input_tokens)
    assert lengths[7] is None  # of a failed request AIPerf does not tell
    assert not compare_runs(a_unnamed, unnamed, Plan())[0].paired


def test_totals_of_aiperf(tmp_path: Path) -> None:
    path = tmp_path / "profile_export_aiperf.json"
    path.write_text(json.dumps({
        "request_latency": {"unit": "ms", "avg": 310.0, "p50": 300.0, "p99": 400.0},
        "time_to_first_token": {"unit": "ms", "avg": 41.0, "p50": 40.0},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 900.0},
    }))  # fmt: skip
    run = read_run(path)
    assert run.totals == {"e2e": pytest.approx(0.3), "ttft": pytest.approx(0.04), "throughput": 900.0}
    # A run with requests against one with totals: medians of both.
    comparison, _ = compare_runs(run, read_run(aiperf(tmp_path / "b.jsonl", slow=2.0)), Plan())
    assert comparison.primary.ratio == pytest.approx(2.0 * 1.04, rel=0.05)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no JSON"),
        ("[1, 2]", "is of no known form"),
        ('{"a": 1}', "is of no known form"),
        ('{"format": "sol-bench/1", "stages": [{}]}', "a part of it is not as it should be"),
        ('{"metadata": {}}\n{"nothing": 1}\n', "line 2 is no record of AIPerf's"),
        ('{"benchmarks": []}', "has no load that was measured"),
    ],
)
def test_files_that_are_no_results_are_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_run(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run(tmp_path / "nothing")
