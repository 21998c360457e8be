"""On the virtual clock the laws hold to the last bit that floating point has."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sol.errors import ConfigError, RequestError
from sol.simulate import EngineLaws, Fault, SimulatedRequest, VirtualServer, profile
from sol.simulate.blocks import block_hashes, named_hashes

LAWS: dict[str, Any] = {
    "max_model_len": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 512, "num_blocks": 2000,
    "step_seconds": 0.01, "sequence_seconds": 0.001, "prefill_token_seconds": 0.0001, "context_token_seconds": 1e-6,
    "draft_token_seconds": 0.002, "verify_token_seconds": 0.0005,
}  # fmt: skip


def laws(**changes: Any) -> EngineLaws:
    return EngineLaws(**{**LAWS, **changes})


def run_one(rules: EngineLaws, **request: Any) -> SimulatedRequest:
    server = VirtualServer(rules)
    server.submit(1.0, **request)
    (done,) = server.run()
    return done


def gaps(request: SimulatedRequest) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(request.token_times)]


@pytest.mark.parametrize("prompt_tokens", [1, 511, 512, 513, 2000])
def test_the_first_token_comes_after_the_prompts_chunks(prompt_tokens: int) -> None:
    done = run_one(laws(), prompt_tokens=prompt_tokens, output_tokens=1)
    chunks = -(-prompt_tokens // 512)
    assert done.ttft == pytest.approx(chunks * 0.011 + prompt_tokens * 0.0001, rel=1e-12)
    assert done.ttft == pytest.approx(laws().expected_ttft(prompt_tokens), rel=1e-12)
    assert done.finish_time == done.first_token_time


def test_tokens_follow_at_steps_that_grow_with_the_context() -> None:
    done = run_one(laws(), prompt_tokens=100, output_tokens=6)
    assert gaps(done) == pytest.approx([0.011 + context * 1e-6 for context in (101, 102, 103, 104, 105)], rel=1e-9)
    assert done.e2e == pytest.approx(laws().expected_e2e(100, 6), rel=1e-12)
    assert done.tpot == pytest.approx(laws().expected_tpot(100, 6), rel=1e-12)


def test_requests_that_decode_together_share_the_step() -> None:
    rules = laws(context_token_seconds=0.0)
    server = VirtualServer(rules)
    for _ in range(5):
        server.submit(0.0, prompt_tokens=10, output_tokens=20)
    for done in server.run():
        assert gaps(done) == pytest.approx([0.01 + 5 * 0.001] * 19, rel=1e-9)
        assert done.ttft == pytest.approx(0.01 + 5 * 0.001 + 50 * 0.0001, rel=1e-12)
        assert done.tpot == pytest.approx(rules.expected_itl(5), rel=1e-9)


def test_who_finds_no_place_waits_in_the_order_of_arrival() -> None:
    server = VirtualServer(laws(max_num_seqs=1, context_token_seconds=0.0))
    for at in (0.0, 0.001, 0.002):
        server.submit(at, prompt_tokens=10, output_tokens=3)
    first, second, third = server.run()
    service = 3 * 0.011 + 10 * 0.0001
    assert [r.request_id for r in (first, second, third)] == ["0", "1", "2"]
    assert second.queue_seconds == pytest.approx(service - 0.001, rel=1e-12)
    assert third.queue_seconds == pytest.approx(2 * service - 0.002, rel=1e-12)
    assert third.ttft == pytest.approx(third.queue_seconds + 0.012, rel=1e-12)


def test_an_arrival_during_a_step_waits_for_its_end_and_one_at_its_end_does_not() -> None:
    rules = laws(context_token_seconds=0.0)
    server = VirtualServer(rules)
    first = server.submit(0.0, prompt_tokens=10, output_tokens=5)
    end = rules.expected_ttft(10)
    early = server.submit(end / 2, prompt_tokens=10, output_tokens=1)
    punctual = server.submit(end, prompt_tokens=10, output_tokens=1)
    server.run()
    assert first.token_times[0] == end
    assert early.scheduled_time == punctual.scheduled_time == end


def test_a_long_prompt_shares_steps_with_those_that_decode() -> None:
    server = VirtualServer(laws())
    running = server.submit(0.0, prompt_tokens=10, output_tokens=50)
    server.run(until=0.1)
    long = server.submit(server.now, prompt_tokens=1200, output_tokens=1)
    server.run()
    slow = [gap for gap in gaps(running) if gap > 0.03]
    # One token of each step is the other's, so three chunks of 511, 511 and 178 tokens.
    assert slow == pytest.approx([0.012 + 0.0511, 0.012 + 0.0511], abs=1e-4)
    assert sum(0.02 < gap < 0.032 for gap in gaps(running)) == 1
    assert long.num_preemptions == 0


def test_without_chunked_prefill_a_prompt_waits_for_a_step_with_room() -> None:
    rules = laws(enable_chunked_prefill=False, max_num_batched_tokens=4096)
    server = VirtualServer(rules)
    server.submit(0.0, prompt_tokens=3000, output_tokens=2)
    second = server.submit(0.0, prompt_tokens=1500, output_tokens=1)
    third = server.submit(0.0, prompt_tokens=1, output_tokens=1)
    server.run()
    end = rules.expected_ttft(3000)
    assert second.scheduled_time == pytest.approx(end, rel=1e-12)
    assert third.scheduled_time == second.scheduled_time  # nobody overtakes
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        laws(enable_chunked_prefill=False)


def test_a_shared_prefix_is_computed_once() -> None:
    rules = laws()
    server = VirtualServer(rules)
    hashes = named_hashes("system prompt", 320, 16)
    cold = server.submit(0.0, prompt_tokens=330, output_tokens=2, block_hashes=hashes)
    warm = server.submit(1.0, prompt_tokens=400, output_tokens=2, block_hashes=hashes)
    other = server.submit(2.0, prompt_tokens=330, output_tokens=2, block_hashes=named_hashes("other", 320, 16))
    # A prompt that is found whole still computes its last token, and the block with it.
    whole = server.submit(3.0, prompt_tokens=320, output_tokens=2, block_hashes=hashes)
    server.run()
    assert [r.cached_tokens for r in (cold, warm, other, whole)] == [0, 320, 0, 304]
    assert warm.ttft == pytest.approx(rules.expected_ttft(400, 320), rel=1e-12)
    assert whole.cached_tokens == rules.cached_tokens(320, 320)
    assert whole.ttft == pytest.approx(0.011 + 16 * 0.0001, rel=1e-12)
    counters = server.engine.counters
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (1380, 624)
    assert run_one(laws(enable_prefix_caching=False), prompt_tokens=32, output_tokens=1).cached_tokens == 0


def test_an_answer_is_found_by_the_turn_that_follows() -> None:
    server = VirtualServer(laws())
    first_turn, answer = list(range(100)), list(range(500, 560))
    server.submit(0.0, prompt_tokens=100, output_tokens=60, block_hashes=block_hashes(first_turn + answer, 16))
    following = [*first_turn, *answer, 7, 8, 9]
    second = server.submit(5.0, prompt_tokens=163, output_tokens=1, block_hashes=block_hashes(following, 16))
    server.run()
    # 159 tokens are computed when the last one is sampled: nine whole blocks.
    assert second.cached_tokens == 144


def test_what_was_used_least_recently_is_forgotten_first() -> None:
    server = VirtualServer(laws(max_model_len=512, num_blocks=32))
    names = ["a", "b", "a", "c", "a", "b"]
    for i, name in enumerate(names):
        server.submit(float(i), prompt_tokens=201, output_tokens=1, block_hashes=named_hashes(name, 192, 16))
    # Two prompts of 13 blocks fit: "c" drives out "b", which was used before "a" was.
    cached = [request.cached_tokens for request in server.run()]
    assert cached[:3] == [0, 0, 192]
    assert cached[4] == 192
    assert cached[5] < 192


def test_the_latest_is_preempted_when_blocks_run_out_and_computes_everything_again() -> None:
    server = VirtualServer(laws(max_model_len=256, num_blocks=16, enable_prefix_caching=False))
    first = server.submit(0.0, prompt_tokens=112, output_tokens=60)
    second = server.submit(0.0, prompt_tokens=112, output_tokens=60)
    while server.engine.counters.num_preemptions == 0:
        server.run(until=server.now + 0.01)
        server.engine.check_integrity()
    finished = server.run()
    assert finished == [first, second]
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    # Both hold 8 blocks for 128 tokens; the 129th needs a ninth. The other comes back when the first has gone.
    gap = max(gaps(second))
    resumed = second.prompt_tokens + 17
    assert second.token_counts.tolist() == [1] * 60
    assert gap > first.token_times[-1] - first.token_times[17]
    back = second.token_times[gaps(second).index(gap) + 1]
    assert back - first.finish_time == pytest.approx(0.011 + resumed * 0.0001, rel=1e-9)
    server.engine.check_integrity()


@pytest.mark.parametrize(("rate", "drafts"), [(0.0, 3), (0.5, 1), (0.7, 4), (0.9, 8), (1.0, 4)])
def test_speculation_emits_the_mean_acceptance_length(rate: float, drafts: int) -> None:
    rules = laws(acceptance_rate=rate, num_speculative_tokens=drafts, context_token_seconds=0.0)
    done = run_one(rules, prompt_tokens=10, output_tokens=4000)
    full = list(done.token_counts)[1:-1]
    assert statistics.mean(full) == pytest.approx(rules.expected_acceptance_length(), rel=0.05)
    assert max(full) <= drafts + 1
    assert sum(done.token_counts) == 4000
    step = 0.011 + drafts * (0.002 + 0.0005)
    assert gaps(done)[0] == pytest.approx(step, rel=1e-12)
    assert rules.expected_step() == pytest.approx(step, rel=1e-12)
    assert done.tpot == pytest.approx(rules.expected_itl(), rel=0.05)
    assert 1 + done.num_accepted_tokens / done.num_drafts == pytest.approx(statistics.mean(full), rel=0.02)


def test_drafts_never_go_beyond_the_answer_and_may_be_declined() -> None:
    rules = laws(acceptance_rate=1.0, num_speculative_tokens=4)
    done = run_one(rules, prompt_tokens=10, output_tokens=8)
    # 1, then 5 of which 4 drafted; of the 2 left one is drafted.
    assert done.token_counts.tolist() == [1, 5, 2]
    assert (done.num_draft_tokens, done.num_accepted_tokens) == (5, 5)
    plain = run_one(rules, prompt_tokens=10, output_tokens=8, speculate=False)
    assert plain.token_counts.tolist() == [1] * 8
    assert plain.num_draft_tokens == 0
    counters = VirtualServer(rules).engine.counters
    assert counters.drafted_per_position == [0, 0, 0, 0]


def test_positions_are_accepted_as_often_as_the_law_says() -> None:
    server = VirtualServer(laws(acceptance_rate=0.6, num_speculative_tokens=3))
    for i in range(8):
        server.submit(0.0, prompt_tokens=10, output_tokens=1000, seed=i)
    server.run()
    counters = server.engine.counters
    for position in range(3):
        share = counters.accepted_per_position[position] / counters.drafted_per_position[position]
        assert share == pytest.approx(0.6 ** (position + 1), abs=0.03)


def test_what_one_request_draws_depends_on_nobody_else() -> None:
    rules = laws(acceptance_rate=0.5, num_speculative_tokens=4)
    alone = run_one(rules, prompt_tokens=10, output_tokens=100, seed=7)
    server = VirtualServer(rules)
    for seed in range(5):
        server.submit(0.0, prompt_tokens=50, output_tokens=80, seed=seed)
    crowded = server.submit(0.05, prompt_tokens=10, output_tokens=100, seed=7)
    server.run()
    assert crowded.token_counts == alone.token_counts
    assert crowded.token_times != alone.token_times


def test_noise_has_mean_one_and_its_seed() -> None:
    rules = laws(noise="lognormal", noise_sigma=0.2, context_token_seconds=0.0)
    done = run_one(rules, prompt_tokens=10, output_tokens=4000)
    assert statistics.mean(gaps(done)) == pytest.approx(0.011, rel=0.02)
    assert statistics.stdev(gaps(done)) == pytest.approx(0.011 * 0.202, rel=0.1)
    assert run_one(rules, prompt_tokens=10, output_tokens=4000).token_times == done.token_times
    other = laws(noise="lognormal", noise_sigma=0.2, context_token_seconds=0.0, seed=1)
    assert run_one(other, prompt_tokens=10, output_tokens=4000).token_times != done.token_times


def test_a_busy_server_gives_the_expected_throughput() -> None:
    rules = profile("h100-8b", max_num_seqs=32)

    def again(_done: SimulatedRequest) -> None:
        if server.now < 60:
            server.submit(server.now, prompt_tokens=300, output_tokens=100)

    server = VirtualServer(rules, on_finish=again)
    for i in range(32):  # not in step with one another
        server.submit(i * 0.021, prompt_tokens=300, output_tokens=100)
    done = [request for request in server.run() if request.finish_time < 60]
    rate = sum(request.num_output for request in done) / 60
    assert rate == pytest.approx(rules.expected_throughput(32, 300, 100), rel=0.04)
    # Little's law, which no scheduler can break.
    assert len(done) / 60 * statistics.mean(request.e2e for request in done) == pytest.approx(32, rel=0.03)


def test_time_stands_still_in_a_stall_and_runs_slower_where_it_is_slow() -> None:
    server = VirtualServer(laws(context_token_seconds=0.0), faults=[Fault(kind="stall", start=0.5, seconds=1.0)])
    done = server.submit(0.0, prompt_tokens=10, output_tokens=100)
    server.run()
    assert max(gaps(done)) == pytest.approx(1.011, rel=1e-9)
    assert done.e2e == pytest.approx(laws(context_token_seconds=0.0).expected_e2e(10, 100) + 1.0, rel=1e-12)

    leak = Fault(kind="slow", start=0.0, factor=1.0, growth_per_second=0.1)
    server = VirtualServer(laws(context_token_seconds=0.0), faults=[leak])
    done = server.submit(10.0, prompt_tokens=10, output_tokens=100)
    server.run()
    assert done.ttft == pytest.approx(0.012 * 2.0, rel=1e-9)
    assert all(later > earlier for earlier, later in itertools.pairwise(gaps(done)))

    server = VirtualServer(laws(), faults=[Fault(kind="stall", start=0.1)])
    server.submit(0.0, prompt_tokens=10, output_tokens=100)
    assert server.run() == []  # it hangs, the caller does not
    with pytest.raises(ConfigError, match="no connections"):
        VirtualServer(laws(), faults=[Fault(kind="reset")])


def test_who_leaves_frees_the_place() -> None:
    server = VirtualServer(laws(max_num_seqs=1))
    first = server.submit(0.0, prompt_tokens=100, output_tokens=1000)
    second = server.submit(0.0, prompt_tokens=100, output_tokens=1)
    third = server.submit(0.0, prompt_tokens=100, output_tokens=1)
    server.run(until=0.5)
    server.abort(first)
    server.abort(second)
    assert server.run() == [third]
    assert first.aborted
    assert 1 < first.num_output < 1000
    assert second.num_output == 0
    assert third.finish_time < 0.6
    server.engine.check_integrity()
    assert server.engine.pool.usage == 0


def test_impossible_requests_and_laws_are_refused() -> None:
    server = VirtualServer(laws())
    with pytest.raises(RequestError, match="max_model_len"):
        server.submit(0.0, prompt_tokens=4000, output_tokens=97)
    with pytest.raises(RequestError, match="output token"):
        server.submit(0.0, prompt_tokens=1, output_tokens=0)
    server.run(until=2.0)
    with pytest.raises(ValueError, match="arrive"):
        server.submit(1.0, prompt_tokens=1, output_tokens=1)
    for name, value in [("step_seconds", 0.0), ("sequence_seconds", -1.0), ("acceptance_rate", 1.1), ("noise", "white"),
                        ("block_size", 0), ("num_blocks", 1), ("max_num_seqs", True), ("seed", "x"),
                        ("enable_prefix_caching", 1), ("prefill_token_seconds", float("nan"))]:  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            laws(**{name: value})
        assert caught.value.param in (name, "max_model_len")
    with pytest.raises(ConfigError, match="profile"):
        profile("h900")


@settings(max_examples=40, deadline=None)
@given(
    rules=st.fixed_dictionaries(
        {
            "max_num_seqs": st.integers(1, 6),
            "max_num_batched_tokens": st.integers(1, 64),
            "num_blocks": st.integers(16, 40),
            "block_size": st.sampled_from([4, 8]),
            "max_model_len": st.just(64),
            "num_speculative_tokens": st.integers(0, 4),
            "enable_prefix_caching": st.booleans(),
            "seed": st.integers(0, 9),
        }
    ),
    requests=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 24), st.floats(0, 0.5), st.sampled_from("abc"), st.booleans()),
        max_size=12,
    ),
)
def test_everything_adds_up_whatever_comes(
    rules: dict[str, Any], requests: list[tuple[int, int, float, str, bool]]
) -> None:
    server = VirtualServer(laws(**rules))
    submitted = [
        server.submit(at, prompt_tokens=prompt, output_tokens=output,
                      block_hashes=named_hashes(name, prompt + output, rules["block_size"]))
        for prompt, output, at, name, _ in requests
    ]  # fmt: skip
    finished: list[SimulatedRequest] = []
    for step in range(1, 40):
        finished += server.run(until=step * 0.02)
        server.engine.check_integrity()
        if step == 12:
            for request, (*_, leaves) in zip(submitted, requests, strict=True):
                if leaves:
                    server.abort(request)
    finished += server.run()
    server.engine.check_integrity()
    assert server.engine.idle
    assert {id(r) for r in finished} == {id(r) for r in submitted if not r.aborted}
    for request in finished:
        assert sum(request.token_counts) == request.num_output == request.output_tokens
        assert list(request.token_times) == sorted(request.token_times)
        assert request.arrival_time <= request.scheduled_time < request.first_token_time <= request.finish_time
    assert server.engine.pool.usage == 0
    assert server.engine.counters.num_generated_tokens == sum(sum(request.token_counts) for request in submitted)


def test_hours_of_load_are_the_same_every_time() -> None:
    def run() -> list[tuple[str, float]]:
        server = VirtualServer(profile("h100-8b", noise="lognormal", num_speculative_tokens=2))
        for i in range(500):
            server.submit(i * 0.04, prompt_tokens=50 + i % 7 * 100, output_tokens=1 + i % 40)
        return [(request.request_id, request.finish_time or 0.0) for request in server.run()]

    assert run() == run()
