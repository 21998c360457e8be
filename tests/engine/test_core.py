from __future__ import annotations

import pytest
from token_runner import VOCAB_SIZE, FailingRunner, TokenRunner, make_config, make_core, make_request

from sol.engine.core import EngineCore
from sol.engine.types import RequestOutput
from sol.errors import EngineDeadError


def run(core: EngineCore) -> dict[str, RequestOutput]:
    """Step until nothing is left to do; each request's last output."""
    last = {}
    while core.has_work:
        for output in core.step().outputs:
            if output.finish_reason is not None:
                last[output.request_id] = output
        core.check_integrity()
    return last


def test_a_step_without_work_is_empty() -> None:
    core = make_core()
    assert not core.has_work
    output = core.step()
    assert output.outputs == []
    assert output.stats.iteration_tokens == 0


def test_stats_are_counted_once() -> None:
    core = make_core()
    core.add([make_request("a", [1, 2, 3, 4, 5], max_tokens=2)])
    first, second, third = (core.step().stats for _ in range(3))
    assert (first.num_running, first.iteration_tokens) == (1, 5)
    assert (first.num_prompt_tokens, first.num_generated_tokens) == (5, 1)
    assert first.kv_cache_usage == pytest.approx(2 / 64)
    assert (second.num_running, second.iteration_tokens, second.num_prompt_tokens) == (0, 1, 0)
    assert third.num_generated_tokens == third.prefix_cache_queries == 0


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty"),
        ([1] * 64, {}, "max_model_len"),
        ([1, VOCAB_SIZE], {}, f"token id {VOCAB_SIZE} is not in the vocabulary"),
        ([1, -1], {}, "token id -1 is not in the vocabulary"),
        ([1], {"stop_token_ids": [999]}, "stop_token_ids: token id 999"),
        ([1], {"logit_bias": {999: 1.0}}, "logit_bias: token id 999"),
    ],
)
def test_a_bad_request_fails_alone(prompt: list[int], params: dict[str, object], message: str) -> None:
    core = make_core()
    good = make_request("good", [1, 2], max_tokens=3)
    core.add([make_request("bad", prompt, **params), good])  # type: ignore[arg-type]
    last = run(core)
    assert last["bad"].finish_reason == "error"
    assert message in (last["bad"].error or "")
    assert last["good"].finish_reason == "length"


def test_two_requests_with_one_id_both_end() -> None:
    core = make_core()
    core.add([make_request("a", [1], max_tokens=None), make_request("b", [1], max_tokens=2)])
    core.step()
    core.add([make_request("a", [2])])
    ended = {output.request_id: output for output in core.step().outputs}
    assert (ended["a"].finish_reason, ended["a"].error) == ("error", "request_id 'a' is in use")
    assert ended["b"].finish_reason == "length"
    assert not core.has_work


def test_a_refusal_is_an_output() -> None:
    core = make_core()
    core.refuse("a", "cannot be read")
    assert core.has_work
    (output,) = core.step().outputs
    assert (output.request_id, output.finish_reason, output.error) == ("a", "error", "cannot be read")


def test_abort_follows_add_in_order() -> None:
    core = make_core()
    core.add([make_request("a", [1])])
    core.abort(["a", "unknown"])
    core.wait()
    core.abort(["a"])
    (output,) = core.step().outputs
    assert output.finish_reason == "abort"
    assert not core.has_work


def test_a_failing_runner_ends_the_engine_and_every_request(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(max_num_seqs=1)
    core = make_core(config, FailingRunner(config))
    core.add([make_request("runs", [1], max_tokens=5), make_request("waits", [2])])
    core.step()
    outputs = core.step().outputs
    assert {o.request_id for o in outputs} == {"runs", "waits"}
    assert {(o.finish_reason, o.error) for o in outputs} == {
        ("error", "the engine failed: ArithmeticError: out of luck")
    }
    assert "out of luck" in caplog.text
    core.check_integrity()
    assert not core.has_work
    with pytest.raises(EngineDeadError, match="out of luck"):
        core.step()


def test_an_interrupted_step_ends_the_engine() -> None:
    config = make_config()
    runner = FailingRunner(config)
    runner.error = KeyboardInterrupt()
    core = make_core(config, runner)
    core.add([make_request("a", [1], max_tokens=5)])
    core.step()
    with pytest.raises(KeyboardInterrupt):
        core.step()
    with pytest.raises(EngineDeadError, match="interrupted"):
        core.step()


def test_an_engine_that_works_ahead_reads_a_step_after_it_has_started_the_next() -> None:
    config = make_config()
    runner = TokenRunner(config)
    core = make_core(config, runner, work_ahead=1)
    core.add([make_request("a", [1, 2, 3], max_tokens=2)])
    assert core.step().outputs == []
    first = core.step()
    assert (len(runner.plans), first.stats.iteration_tokens, len(first.outputs)) == (2, 3, 1)
    last = core.step()
    assert (len(runner.plans), last.stats.iteration_tokens) == (2, 1)
    assert last.outputs[0].finish_reason == "length"
    assert not core.has_work


def test_a_started_step_is_read_even_if_nobody_waits_for_it() -> None:
    core = make_core(work_ahead=1)
    core.add([make_request("a", [1], max_tokens=5)])
    core.step()
    core.abort(["a"])
    assert core.step().outputs[0].finish_reason == "abort"
    while core.has_work:
        core.wait()
        core.step()
    core.check_integrity()
    core.add([make_request("a", [1, 2], max_tokens=1)])
    assert run(core)["a"].finish_reason == "length"


def test_a_failure_while_working_ahead_ends_every_request() -> None:
    config = make_config()
    core = make_core(config, FailingRunner(config), work_ahead=1)
    core.add([make_request("a", [1], max_tokens=5)])
    core.step()
    assert core.step().outputs[0].finish_reason == "error"
    assert not core.has_work
    core.check_integrity()
