from __future__ import annotations

import pytest
from token_runner import VOCAB_SIZE, TokenRunner, expected_output, logprobs_of, make_config, make_request

from sol.config import SchedulerConfig
from sol.engine.scheduler import Scheduler
from sol.engine.speculation import Speculation
from sol.engine.types import Draft, EngineStats, RequestOutput, SchedulerOutput, StepOutput
from sol.errors import ConfigError, ContextLengthError, RequestError
from sol.speculation.plan.fixed import FixedController


class Driver:
    """A scheduler and the token runner, one step at a time."""

    def __init__(self, **config: int | bool) -> None:
        self.config: SchedulerConfig = make_config(**config)
        self.scheduler = Scheduler(self.config)
        self.runner = TokenRunner(self.config)
        self.outputs: dict[str, RequestOutput] = {}
        self.stats = EngineStats()

    def add(self, name: str, prompt: list[int], **params: object) -> None:
        self.scheduler.add(make_request(name, prompt, **params))  # type: ignore[arg-type]

    def step(self) -> SchedulerOutput:
        plan = self.scheduler.schedule()
        assert plan is not None
        for output in self.scheduler.update_from_output(self.runner.execute(plan)):
            self.outputs[output.request_id] = output
        self.scheduler.check_integrity()
        self.stats = self.scheduler.take_stats()
        return plan

    def counts(self) -> dict[str, int]:
        return self.step().num_scheduled_tokens


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % VOCAB_SIZE for i in range(length)]


# ── the step's budget ────────────────────────────────────────────────────────────────────────────────────────────


def test_prompts_are_computed_in_chunks_of_the_budget() -> None:
    driver = Driver(max_num_batched_tokens=10)
    driver.add("a", prompt(24))
    driver.add("b", prompt(3, start=40))
    assert driver.counts() == {"a": 10}
    assert driver.counts() == {"a": 10}
    assert driver.outputs == {}
    assert driver.counts() == {"a": 4, "b": 3}
    assert driver.outputs.keys() == {"a", "b"}
    assert driver.counts() == {"a": 1, "b": 1}


def test_prompts_beside_decodes_are_capped() -> None:
    driver = Driver(max_num_batched_tokens=20, max_num_prefill_tokens=6)
    driver.add("a", prompt(20))
    assert driver.counts() == {"a": 20}
    driver.add("b", prompt(15, start=30))
    driver.add("c", prompt(15, start=50))
    assert driver.counts() == {"a": 1, "b": 6}
    assert driver.counts() == {"a": 1, "b": 6}
    assert driver.counts() == {"a": 1, "b": 3, "c": 3}
    assert driver.counts() == {"a": 1, "b": 1, "c": 6}


def test_an_older_prompt_does_not_keep_younger_decodes_waiting() -> None:
    driver = Driver(max_num_batched_tokens=4, max_num_prefill_tokens=100)
    driver.add("long", prompt(17))
    assert driver.counts() == {"long": 4}
    driver.scheduler.finish("long", "abort")
    driver.add("short", prompt(2, start=30), max_tokens=50)
    driver.add("long2", prompt(40, start=20))
    assert driver.counts() == {"short": 2, "long2": 2}
    assert driver.counts() == {"short": 1, "long2": 3}


def test_a_prompt_moves_even_if_decodes_could_fill_the_step() -> None:
    driver = Driver(max_num_batched_tokens=2, max_num_seqs=4)
    for name in "abc":
        driver.add(name, prompt(2, start=ord(name)), max_tokens=4)
    for _ in range(40):
        if not driver.scheduler.has_unfinished:
            break
        assert sum(driver.counts().values()) <= 2
    assert [driver.outputs[name].finish_reason for name in "abc"] == ["length"] * 3


def test_no_more_rows_than_max_num_seqs() -> None:
    driver = Driver(max_num_seqs=2)
    for name in "abc":
        driver.add(name, prompt(2), max_tokens=2)
    assert list(driver.counts()) == ["a", "b"]
    assert (driver.stats.num_running, driver.stats.num_waiting) == (2, 1)
    driver.step()
    assert list(driver.counts()) == ["c"]


def test_a_request_that_does_not_fit_blocks_those_behind_it() -> None:
    driver = Driver(max_model_len=32, num_blocks=8)
    driver.add("a", prompt(15), max_tokens=2)
    driver.add("large", prompt(21, start=20), max_tokens=2)
    driver.add("small", prompt(2, start=50), max_tokens=2)
    assert list(driver.counts()) == ["a"]
    driver.step()
    assert list(driver.counts()) == ["large", "small"]


# ── prefix cache ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_choices_that_arrive_together_compute_their_prompt_once() -> None:
    driver = Driver()
    for choice in range(4):
        driver.add(f"c{choice}", prompt(18), choice_index=choice)
    plan = driver.step()
    assert plan.num_scheduled_tokens == {"c0": 18, "c1": 2, "c2": 2, "c3": 2}
    assert len({tuple(new.block_ids[:4]) for new in plan.new_requests}) == 1
    assert (driver.stats.prefix_cache_queries, driver.stats.prefix_cache_hits) == (72, 48)
    assert driver.stats.num_prompt_tokens == 72
    assert [driver.outputs[f"c{i}"].num_cached_tokens for i in range(4)] == [0, 16, 16, 16]


def test_choices_wait_for_the_chunks_they_share() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add("a", prompt(18), max_tokens=3)
    driver.add("b", prompt(18), max_tokens=3, choice_index=1)
    assert driver.counts() == {"a": 8}
    assert driver.counts() == {"a": 8}
    assert driver.counts() == {"a": 2, "b": 2}


def test_a_finished_request_leaves_its_blocks_to_be_found() -> None:
    driver = Driver()
    driver.add("a", prompt(9), max_tokens=4)
    while driver.scheduler.has_unfinished:
        driver.step()
    assert driver.stats.kv_cache_usage == 0.0
    continuation = (
        driver.runner.plans[0].new_requests[0].token_ids
        + expected_output(make_request("a", prompt(9), max_tokens=4), 64)[0]
    )
    driver.add("b", continuation, max_tokens=1)
    assert driver.counts() == {"b": 1}
    assert driver.outputs["b"].num_cached_tokens == 12


def test_without_prefix_caching_nothing_is_shared_or_counted() -> None:
    driver = Driver(enable_prefix_caching=False)
    driver.add("a", prompt(18))
    driver.add("b", prompt(18))
    assert driver.counts() == {"a": 18, "b": 18}
    assert (driver.stats.prefix_cache_queries, driver.stats.prefix_cache_hits) == (0, 0)


# ── preemption ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_youngest_gives_its_blocks_to_the_oldest_and_comes_back() -> None:
    driver = Driver(max_model_len=32, num_blocks=8, max_num_batched_tokens=32)
    requests = {name: make_request(name, prompt(7, start=ord(name)), max_tokens=24) for name in "ab"}
    for request in requests.values():
        driver.scheduler.add(request)
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    preemptions, finished, queries = 0, [], 0
    while driver.scheduler.has_unfinished:
        driver.outputs.clear()
        plan = driver.step()
        preemptions += driver.stats.num_preemptions
        queries += driver.stats.prefix_cache_queries
        if driver.stats.num_preemptions:
            assert plan.removed_request_ids == ["b"]
            assert list(plan.num_scheduled_tokens) == ["a"]
            assert driver.stats.num_waiting == 1
        for name, output in driver.outputs.items():
            tokens[name] += output.new_token_ids
            finished += [name] if output.finish_reason else []
    assert preemptions > 0
    assert finished == ["a", "b"]
    assert queries == 14  # once a request, not again when it comes back
    for name, request in requests.items():
        assert tokens[name] == expected_output(request, 32)[0]


def test_the_youngest_waits_with_its_blocks_when_only_older_ones_could_give() -> None:
    driver = Driver(max_model_len=32, num_blocks=8)
    driver.add("a", prompt(14), max_tokens=2)  # will never need a fifth block
    driver.add("b", prompt(16, start=30), max_tokens=4)  # needs one in its second step
    assert driver.counts() == {"a": 14, "b": 16}
    assert driver.counts() == {"a": 1}
    assert driver.outputs["a"].finish_reason == "length"
    assert driver.stats.num_running == 1
    assert driver.stats.num_preemptions == 0
    assert driver.counts() == {"b": 1}


def test_admission_leaves_a_block_for_each_request_that_may_grow() -> None:
    driver = Driver(max_model_len=32, num_blocks=8)
    driver.add("a", prompt(16), max_tokens=16)  # has 4 blocks, may need 4 more
    driver.add("b", prompt(16, start=30), max_tokens=1)  # 4 blocks are free, but one of them is a's
    assert list(driver.counts()) == ["a"]
    driver = Driver(max_model_len=32, num_blocks=8)
    driver.add("a", prompt(16), max_tokens=1)
    driver.add("b", prompt(16, start=30), max_tokens=1)
    assert list(driver.counts()) == ["a", "b"]


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_abort_at_any_moment() -> None:
    driver = Driver(max_num_seqs=1, max_num_batched_tokens=8)
    driver.add("half", prompt(20), logprobs=0)
    driver.add("waiting", prompt(5))
    driver.step()
    output = driver.scheduler.finish("half", "abort")
    assert output is not None
    assert (output.finish_reason, output.new_token_ids, output.logprobs) == ("abort", [], [])
    driver.scheduler.check_integrity()
    waiting = driver.scheduler.finish("waiting", "abort")
    assert waiting is not None
    assert waiting.logprobs is None
    assert driver.scheduler.finish("waiting", "abort") is None
    assert not driver.scheduler.has_unfinished
    driver.scheduler.check_integrity()
    driver.add("next", prompt(3))
    assert driver.step().removed_request_ids == ["half"]


def test_a_request_aborted_while_its_step_runs_gets_nothing_more() -> None:
    driver = Driver()
    driver.add("a", prompt(3))
    driver.add("b", prompt(3))
    plan = driver.scheduler.schedule()
    driver.scheduler.finish("a", "abort")
    outputs = driver.scheduler.update_from_output(driver.runner.execute(plan))
    assert [output.request_id for output in outputs] == ["b"]
    driver.scheduler.check_integrity()


def test_an_id_can_be_used_again_in_the_next_step() -> None:
    driver = Driver()
    driver.add("a", prompt(3), max_tokens=1)
    driver.step()
    driver.add("a", prompt(5, start=9), max_tokens=1)
    plan = driver.step()
    assert plan.removed_request_ids == ["a"]
    assert driver.outputs["a"].new_token_ids == expected_output(make_request("a", prompt(5, 9), max_tokens=1), 64)[0]


def verifying(drafts: list[int], **params: object) -> Scheduler:
    """A scheduler whose request "a" (a prompt of 3 tokens, then 5) is planned with all of `drafts`."""
    scheduler = Scheduler(make_config(), Speculation(FixedController(["suffix"], 8), num_speculative_tokens=8))
    scheduler.add(make_request("a", prompt(3), logprobs=1, **params))  # type: ignore[arg-type]
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.proposals["a"].drafter == "suffix"
    first = sampled([5])
    first.drafts["a"] = Draft(drafter="suffix", token_ids=drafts, scores=None)
    scheduler.update_from_output(first)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.draft_token_ids == {"a": drafts}
    assert plan.num_scheduled_tokens == {"a": 1 + len(drafts)}
    return scheduler


def sampled(token_ids: list[int]) -> StepOutput:
    return StepOutput(sampled_token_ids={"a": token_ids}, logprobs={"a": [logprobs_of(t, 1) for t in token_ids]})


def test_tokens_after_the_end_are_dropped() -> None:
    scheduler = verifying([6, 7, 8], max_tokens=9, stop_token_ids=[7])
    scheduler.take_stats()
    (output,) = scheduler.update_from_output(sampled([6, 7, 8, 9]), seconds=0.01)
    assert (output.new_token_ids, output.finish_reason, output.stop_token_id) == ([6, 7], "stop", 7)
    assert output.logprobs is not None
    assert len(output.logprobs) == 2
    stats = scheduler.take_stats()
    assert stats.num_generated_tokens == 2
    assert output.speculation is not None
    for counts in (output.speculation.drafters["suffix"], stats.drafters["suffix"]):
        # The third draft was right as well, and nobody got it.
        assert (counts.num_draft_tokens, counts.num_accepted_tokens) == (3, 2)


def test_rejected_drafts_are_computed_again_and_never_published() -> None:
    scheduler = verifying([6, 7, 8], max_tokens=40)
    (output,) = scheduler.update_from_output(sampled([6, 9]))
    assert output.new_token_ids == [6, 9]
    assert output.speculation is not None
    counts = output.speculation.drafters["suffix"]
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (1, 3, 1)
    scheduler.check_integrity()
    plan = scheduler.schedule()
    assert plan is not None
    # The prompt's 3 tokens, 5 and 6 are computed; 9 comes now, over the slot of a draft that was rejected.
    assert (plan.cached_requests[0].num_computed_tokens, plan.num_scheduled_tokens) == (5, {"a": 1})
    scheduler.check_integrity()


def test_no_draft_is_verified_that_could_not_be_emitted() -> None:
    """One token and three drafts after the first one: that is `max_tokens`, and a fourth draft could not come out."""
    scheduler = verifying([6, 7, 8], max_tokens=5)
    (output,) = scheduler.update_from_output(sampled([6, 7, 8, 9]))
    assert (output.new_token_ids, output.finish_reason) == ([6, 7, 8, 9], "length")


@pytest.mark.parametrize("token_ids", [[], [6, 7, 8, 9, 10]])
def test_fewer_than_one_or_more_tokens_than_drafts_and_one_are_an_error(token_ids: list[int]) -> None:
    with pytest.raises(RuntimeError, match="out of turn"):
        verifying([6, 7, 8], max_tokens=9).update_from_output(sampled(token_ids))


def test_drafts_take_no_block_that_a_running_request_will_want() -> None:
    scheduler = Scheduler(
        make_config(num_blocks=16), Speculation(FixedController(["suffix"], 8), num_speculative_tokens=8)
    )
    names = [f"r{i}" for i in range(4)]
    for i, name in enumerate(names):
        scheduler.add(make_request(name, prompt(11, start=i), max_tokens=30))
    scheduler.schedule()  # 4 requests of 3 blocks: of the 4 that are left, each may soon want one
    first = StepOutput(sampled_token_ids={name: [5] for name in names}, logprobs={})
    first.drafts = {name: Draft(drafter="suffix", token_ids=[1] * 8, scores=None) for name in names}
    scheduler.update_from_output(first)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.draft_token_ids == {}
    assert scheduler.pool.num_free == 4


def test_a_result_that_does_not_answer_the_plan_is_an_error() -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=4))
    scheduler.add(make_request("a", prompt(6), logprobs=0))
    scheduler.schedule()
    with pytest.raises(RuntimeError, match="sampled 1 tokens for 'a' out of turn"):
        scheduler.update_from_output(StepOutput(sampled_token_ids={"a": [1]}, logprobs={}))
    for sampled, message in (({}, "sampled 0 tokens for 'a' out of turn"), ({"a": [1]}, "no logprobs for 'a'")):
        scheduler = Scheduler(make_config())
        scheduler.add(make_request("a", prompt(6), logprobs=0))
        scheduler.schedule()
        with pytest.raises(RuntimeError, match=message):
            scheduler.update_from_output(StepOutput(sampled_token_ids=sampled, logprobs={}))


def test_a_request_that_could_not_be_sampled_ends_alone_and_its_blocks_are_not_found_again() -> None:
    driver = Driver()
    driver.add("a", prompt(9))
    driver.add("b", prompt(9, start=30), max_tokens=2)
    plan = driver.scheduler.schedule()
    result = driver.runner.execute(plan)
    del result.sampled_token_ids["a"]
    result.errors["a"] = "its logits are not numbers"
    failed, other = driver.scheduler.update_from_output(result)
    assert (failed.finish_reason, failed.error, failed.new_token_ids) == ("error", "its logits are not numbers", [])
    assert other.finish_reason is None
    driver.scheduler.check_integrity()
    driver.add("c", prompt(9))
    driver.add("d", prompt(9, start=30))
    plan = driver.step()
    assert plan.num_scheduled_tokens == {"b": 1, "c": 9, "d": 1}
    assert plan.removed_request_ids == ["a"]


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_can_never_be_answered_is_refused() -> None:
    scheduler = Scheduler(make_config())
    with pytest.raises(ContextLengthError):
        scheduler.add(make_request("a", prompt(64)))
    scheduler.add(make_request("a", prompt(63)))
    with pytest.raises(RequestError, match="'a' is in use"):
        scheduler.add(make_request("a", prompt(3)))
    scheduler.check_integrity()


def test_a_pool_that_cannot_hold_one_full_request_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"room for 60 \(15 blocks of 4\)") as caught:
        Scheduler(make_config(max_model_len=64, num_blocks=15))
    assert caught.value.param == "max_model_len"
    with pytest.raises(ConfigError, match="max_num_seqs must be at least 1"):
        Scheduler(make_config(max_num_seqs=0))


def test_an_empty_plan_is_a_mistake() -> None:
    with pytest.raises(RuntimeError, match="empty plan"):
        Scheduler(make_config()).schedule()


def test_check_integrity_finds_what_is_wrong() -> None:
    driver = Driver()
    driver.add("a", prompt(3))
    driver.add("b", prompt(3))
    driver.step()
    driver.scheduler._running.reverse()
    with pytest.raises(AssertionError, match="out of order"):
        driver.scheduler.check_integrity()
    driver.scheduler._running.reverse()
    lost = driver.scheduler._running.pop()
    with pytest.raises(AssertionError, match="lost"):
        driver.scheduler.check_integrity()
    driver.scheduler._running.append(lost)
    lost.num_computed_tokens = 40
    with pytest.raises(AssertionError, match="past its end"):
        driver.scheduler.check_integrity()


# ── working ahead ────────────────────────────────────────────────────────────────────────────────────────────────


def plan_and_run(driver: Driver) -> StepOutput:
    plan = driver.scheduler.schedule()
    assert plan is not None
    driver.scheduler.check_integrity()
    return driver.runner.execute(plan)


def test_a_step_is_planned_before_the_one_before_it_is_read() -> None:
    driver = Driver()
    driver.add("a", prompt(5), max_tokens=3)
    first, second, third = (plan_and_run(driver) for _ in range(3))
    assert [p.num_scheduled_tokens for p in driver.runner.plans] == [{"a": 5}, {"a": 1}, {"a": 1}]
    assert driver.scheduler.schedule() is None  # the third token is the last, whatever it is
    outputs = [o for result in (first, second, third) for o in driver.scheduler.update_from_output(result)]
    wanted = expected_output(make_request("a", prompt(5), max_tokens=3), 64)[0]
    assert [o.new_token_ids for o in outputs] == [[token] for token in wanted]
    assert outputs[-1].finish_reason == "length"
    driver.scheduler.check_integrity()


def test_what_was_planned_for_a_request_that_ended_is_dropped() -> None:
    driver = Driver(enable_prefix_caching=False)
    token = expected_output(make_request("a", prompt(5), max_tokens=1), 64)[0][0]
    driver.add("a", prompt(5), stop_token_ids=[token])
    first, surplus = plan_and_run(driver), plan_and_run(driver)
    (output,) = driver.scheduler.update_from_output(first)
    assert (output.new_token_ids, output.finish_reason) == ([token], "stop")
    assert driver.scheduler.pool.usage == 0.0
    # Even if another request of its name has come meanwhile.
    driver.add("a", prompt(7, start=20), max_tokens=1)
    third = plan_and_run(driver)
    assert driver.scheduler.update_from_output(surplus) == []
    assert driver.scheduler.take_stats().num_generated_tokens == 1
    (output,) = driver.scheduler.update_from_output(third)
    assert output.new_token_ids == expected_output(make_request("a", prompt(7, 20), max_tokens=1), 64)[0]
    driver.scheduler.check_integrity()


def test_a_preempted_request_waits_for_the_result_of_its_last_step() -> None:
    driver = Driver(max_model_len=16, num_blocks=4, enable_prefix_caching=False)
    driver.add("old", prompt(6), max_tokens=9)
    driver.add("young", prompt(3, start=30), max_tokens=3)
    results = [plan_and_run(driver) for _ in range(3)]  # the young one takes the last block in the third
    results.append(plan_and_run(driver))  # the old one needs it in the fourth
    assert driver.scheduler.take_stats().num_preemptions == 1
    assert list(driver.runner.plans[-1].num_scheduled_tokens) == ["old"]
    for result in results[:2]:
        assert len(driver.scheduler.update_from_output(result)) == 2
    assert driver.scheduler.take_stats().num_waiting == 1
    young = driver.scheduler.update_from_output(results[2])[1]
    assert (young.request_id, young.finish_reason) == ("young", "length")  # it ended while it waited
    driver.scheduler.check_integrity()
    driver.scheduler.update_from_output(results[3])
    assert driver.scheduler.take_stats().num_waiting == 0


def test_a_block_is_found_once_its_last_token_is_known() -> None:
    driver = Driver()
    driver.add("a", prompt(3))
    first, second = plan_and_run(driver), plan_and_run(driver)
    known = prompt(3) + first.sampled_token_ids["a"]
    driver.add("early", [*known, 1], max_tokens=1)
    third = plan_and_run(driver)
    assert driver.runner.plans[-1].new_requests[0].num_computed_tokens == 0
    for result in (first, second, third):
        driver.scheduler.update_from_output(result)
    driver.add("late", [*known, 2], max_tokens=1)
    driver.step()
    assert driver.outputs["late"].num_cached_tokens == 4


def test_a_failed_row_that_was_preempted_meanwhile_leaves_nothing_to_be_found() -> None:
    driver = Driver(max_model_len=16, num_blocks=4)
    driver.add("old", prompt(6), max_tokens=9)
    driver.add("young", prompt(3, start=30), max_tokens=9)
    results = [plan_and_run(driver) for _ in range(4)]
    assert driver.scheduler.take_stats().num_preemptions == 1
    del results[1].sampled_token_ids["young"]
    results[1].errors["young"] = "its logits are not numbers"
    driver.scheduler.update_from_output(results[0])
    failed = driver.scheduler.update_from_output(results[1])[1]
    assert (failed.request_id, failed.finish_reason) == ("young", "error")
    for result in results[2:]:
        driver.scheduler.update_from_output(result)
    driver.scheduler.finish("old", "abort")
    text = prompt(3, start=30) + results[0].sampled_token_ids["young"]
    driver.add("again", [*text, 1], max_tokens=1)
    driver.step()
    assert driver.outputs["again"].num_cached_tokens == 0


@pytest.mark.parametrize(("requests", "drafts"), [(1, 7), (3, 5), (8, 0), (9, 32)])
def test_drafts_do_not_lift_a_step_out_of_those_that_compute_every_token_as_if_it_were_alone(
    requests: int, drafts: int
) -> None:
    config = make_config(num_invariant_tokens=8, max_num_seqs=16, num_blocks=128)
    scheduler = Scheduler(config, Speculation(FixedController(["suffix"], 8), num_speculative_tokens=8))
    names = [f"r{i}" for i in range(requests)]
    for i, name in enumerate(names):
        scheduler.add(make_request(name, prompt(2, start=i), max_tokens=30))
    scheduler.schedule()
    first = StepOutput(sampled_token_ids={name: [5] for name in names}, logprobs={})
    first.drafts = {name: Draft(drafter="suffix", token_ids=[1] * 8, scores=None) for name in names}
    scheduler.update_from_output(first)
    plan = scheduler.schedule()
    assert plan is not None
    planned = sum(map(len, plan.draft_token_ids.values()))
    assert planned == drafts if requests <= 8 else planned >= drafts
