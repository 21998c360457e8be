"""The whole search, on the simulated server: it finds the best, leaves out what is known to be no use, goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from simulated_tuning import SHORT, Troubled, goal, small_space

from sol.errors import ConfigError
from sol.simulate import profile
from sol.tune import (
    Config,
    Goal,
    Parameter,
    Probe,
    Search,
    SimulatedRunner,
    Space,
    Trial,
    TuneResult,
    Watcher,
    exhaustive,
    tune,
)
from sol.tune.space import key_of
from sol.tune.study import Study

QUICK = Search(trials=12, num_requests=60, tolerance=0.05)


def run(runner: SimulatedRunner, **options: Any) -> TuneResult:
    space, aim = options.pop("space", small_space()), options.pop("aim", goal())
    default, stop, watcher = options.pop("default", None), options.pop("stop", None), options.pop("watcher", None)
    search = Search(**{"trials": 12, "num_requests": 60, "tolerance": 0.05, **options})
    return asyncio.run(tune(runner, space, aim, search=search, default=default, stop=stop, watcher=watcher))


@pytest.mark.parametrize(
    ("name", "changes", "slo", "seed"),
    [
        ("h100-8b", {"prefill_token_seconds": 0.0001}, "ttft_p90<500ms,tpot_p90<25ms", 1),
        ("cpu-small", {"verify_token_seconds": 0.004}, "ttft_p90<4s,tpot_p90<150ms", 2),
        ("l4-8b-int4", {"noise": "lognormal", "noise_sigma": 0.02}, "ttft_p90<3s,tpot_p90<120ms", 3),
    ],
)
def test_a_quarter_of_the_grid_finds_the_best_to_five_percent(
    name: str, changes: dict[str, Any], slo: str, seed: int
) -> None:
    space = Space([
        Parameter(name="max_num_seqs", values=(4, 8, 16, 32, 64), demand="grows"),
        Parameter(name="max_num_batched_tokens", values=(128, 256, 512, 2048), demand="grows"),
        Parameter(name="num_speculative_tokens", values=(0, 2, 4), demand="grows"),
    ])  # fmt: skip
    aim = Goal.of(slo)
    runner = SimulatedRunner(profile(name, **changes), aim.slo, SHORT)
    known = asyncio.run(exhaustive(runner, space, aim, search=QUICK))
    assert known is not None
    result = run(runner, space=space, aim=aim, seed=seed, trials=space.size // 4)
    assert result.num_started <= space.size // 4
    assert result.best is not None
    assert result.best.score >= 0.95 * known.score


def test_the_default_comes_first_and_the_gain_is_over_it() -> None:
    default = {
        "max_num_seqs": 2, "max_num_batched_tokens": 2048, "enable_prefix_caching": True, "num_speculative_tokens": 0
    }  # fmt: skip
    result = run(Troubled(), default=default, trials=6)
    assert result.default is result.trials[0]
    assert result.trials[0].config == default
    assert result.best is not None
    assert result.gain == result.best.score / result.default.score >= 1
    with pytest.raises(ConfigError, match=r"the default .* is not in the space"):
        run(Troubled(), default={**default, "max_num_seqs": 3})


def test_every_configuration_is_tried_once_and_a_small_space_to_its_end() -> None:
    runner = Troubled()
    result = run(runner, trials=1000, num_requests=24)
    assert len(result.trials) == small_space().size
    assert len({key_of(config) for config in runner.started}) == len(runner.started) == result.num_started


def test_short_loads_decide_against_most() -> None:
    result = run(Troubled(), trials=12)
    outcomes = [trial.outcome for trial in result.trials]
    assert outcomes.count("stopped") > outcomes.count("finished")
    for trial in result.trials:
        assert trial.outcome in ("stopped", "finished", "misses")
        assert trial.reason or trial.outcome == "finished"


def test_crashes_exclude_what_asks_for_more() -> None:
    def dies(config: Config) -> str | None:
        return "out of memory" if config["max_num_seqs"] >= 32 else None

    runner = Troubled(dies=dies)
    result = run(runner, trials=1000, num_requests=24)
    crashed = [trial for trial in result.trials if trial.outcome == "crashed"]
    excluded = [trial for trial in result.trials if trial.outcome == "excluded"]
    doomed = [config for config in small_space() if dies(config)]
    assert len(crashed) + sum(dies(trial.config) is not None for trial in excluded) == len(doomed) == 24
    assert len(crashed) < 12, "most were never started"
    assert all(dies(trial.config) for trial in excluded), "nobody pays for another's death"
    assert result.best is not None
    assert any("out of memory" in text for text in result.exclusions)


def test_an_engine_that_never_runs_ends_the_search() -> None:
    runner = Troubled(dies=lambda config: f"no such program ({config['max_num_seqs']})")
    result = run(runner, trials=40)
    assert len(runner.started) == 3
    assert result.best is None


def test_a_bound_below_the_best_keeps_a_configuration_from_starting() -> None:
    runner = Troubled(bound=lambda config: 0.01 if config["max_num_seqs"] > 2 else 1e9)
    result = run(runner, trials=1000, num_requests=24)
    best = result.best
    assert best is not None
    excluded = [trial for trial in result.trials if "by the model of the machine" in trial.reason]
    assert excluded
    assert all(trial.config["max_num_seqs"] > 2 and trial.outcome == "excluded" for trial in excluded)


PRECISIONS = {"quantization": (None, "int8", "int4")}
KNOWN = {None: 0.0, "int8": 0.001, "int4": 0.3}


def test_lossy_choices_keep_to_the_bound_and_each_is_measured_once() -> None:
    runner = Troubled(divergence=lambda config: KNOWN[config["quantization"]])
    result = run(runner, space=small_space(**PRECISIONS), trials=20, num_requests=24)
    tried = {config["quantization"] for config in runner.started}
    assert tried == {None, "int8"}
    assert sorted(config["quantization"] for config in runner.measured) == ["int4", "int8"]
    left_out = [trial for trial in result.trials if trial.config["quantization"] == "int4"]
    assert left_out[0].outcome == "excluded"
    assert left_out[0].kl == 0.3
    assert "above 0.02" in left_out[0].reason


def test_what_nobody_can_measure_needs_leave() -> None:
    space = small_space(**PRECISIONS)
    runner = Troubled()
    result = run(runner, space=space, trials=8, num_requests=24)
    assert {config["quantization"] for config in runner.started} == {None}
    assert any("--allow-lossy" in trial.reason for trial in result.trials)
    allowed = Troubled()
    run(allowed, space=space, trials=8, num_requests=24, aim=goal(allow_lossy=True))
    assert {config["quantization"] for config in allowed.started} > {None}
    assert allowed.measured == []


def test_an_slo_that_nothing_meets() -> None:
    with pytest.raises(ConfigError, match="give both the same"):
        run(Troubled(), aim=Goal.of("ttft_p90<1ms"))
    result = run(Troubled(slo="ttft_p90<1ms"), aim=Goal.of("ttft_p90<1ms"), trials=5)
    assert result.best is None
    assert {trial.outcome for trial in result.trials} <= {"misses", "excluded"}
    assert all(len(trial.probes) == 1 for trial in result.trials if trial.started), "one at a time is enough to know"


def test_with_a_price_the_score_is_good_tokens_for_the_money() -> None:
    aim = goal(price_per_hour=3.6)
    result = run(Troubled(), aim=aim, trials=4)
    assert result.best is not None
    probe = result.best.best
    assert probe is not None
    assert result.best.score == pytest.approx(probe.good_tokens_per_second * 1000)
    assert aim.cost_per_million(probe) == pytest.approx(1e6 / result.best.score)


class StopAfter(Watcher):
    """Stops a search in the middle of its trial number `number`."""

    def __init__(self, number: int, stop: asyncio.Event) -> None:
        self._number, self._stop, self._now = number, stop, 0

    def on_begin(self, number: int, config: Config) -> None:
        self._now = number

    def on_probe(self, probe: Probe) -> None:
        if self._now == self._number:
            self._stop.set()


class Yielding(Troubled):
    """Lets other tasks run between two loads, as a real server does."""

    def start(self, config: Config) -> Any:
        outer = super().start(config)

        class Slow:
            async def __aenter__(self) -> Any:
                self.running = await outer.__aenter__()
                return self

            async def __aexit__(self, *error: Any) -> Any:
                return await outer.__aexit__(*error)

            async def one_at_a_time(self, number: int) -> Probe:
                await asyncio.sleep(0)
                return await self.running.one_at_a_time(number)

            async def at_rate(self, rate: float, number: int) -> Probe:
                for _ in range(3):
                    await asyncio.sleep(0)
                return await self.running.at_rate(rate, number)

        return Slow()


def test_a_search_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "search.journal"
    stop = asyncio.Event()
    first = run(Yielding(), path=path, trials=6, stop=stop, watcher=StopAfter(3, stop))
    assert first.interrupted
    assert [trial.outcome == "interrupted" for trial in first.trials] == [False, False, True]
    runner = Troubled()
    second = run(runner, path=path, trials=6, resume=True)
    assert not second.interrupted
    assert runner.started[0] == first.trials[2].config, "what was broken off comes first"
    assert [trial.config for trial in second.trials[:3]] == [trial.config for trial in first.trials]
    assert second.trials[:2] == first.trials[:2], "nothing is forgotten or measured again"
    whole = run(Troubled(), path=path, trials=6, resume=True)
    assert whole.trials == second.trials


def test_a_stop_does_not_wait_for_a_divergence() -> None:
    stop = asyncio.Event()

    class Slow(Troubled):
        async def divergence(self, config: Config) -> float | None:
            stop.set()
            await asyncio.sleep(3600)
            return 0.0

    result = run(Slow(), space=small_space(**PRECISIONS), trials=30, stop=stop)
    assert result.interrupted
    assert result.trials[-1].outcome == "interrupted"
    assert not any(trial.outcome == "excluded" for trial in result.trials), "nothing was learned of it"


def test_crashes_and_divergences_are_remembered(tmp_path: Path) -> None:
    path, space = tmp_path / "search.journal", small_space(**PRECISIONS)

    def runner() -> Troubled:
        return Troubled(
            dies=lambda config: "out of memory" if config["max_num_seqs"] > 8 else None,
            divergence=lambda config: KNOWN[config["quantization"]],
        )

    first, second = runner(), runner()
    run(first, path=path, space=space, trials=16)
    assert first.measured
    again = run(second, path=path, space=space, trials=30, resume=True)
    known = {config["quantization"] for config in first.measured}
    assert not known & {config["quantization"] for config in second.measured}
    assert again.exclusions


def test_a_file_is_gone_on_with_only_by_the_same_search(tmp_path: Path) -> None:
    path = tmp_path / "search.journal"
    with pytest.raises(ConfigError, match=r"there is no .* to go on with"):
        run(Troubled(), path=path, resume=True)
    run(Troubled(), path=path, trials=2)
    with pytest.raises(ConfigError, match="is there already"):
        run(Troubled(), path=path, trials=2)
    with pytest.raises(ConfigError, match="was begun with slo"):
        run(Troubled(slo="ttft_p90<1s"), path=path, resume=True, aim=Goal.of("ttft_p90<1s"))
    with pytest.raises(ConfigError, match="was begun with model null, not"):
        run(Troubled(), path=path, resume=True, settings={"model": "another"})
    with pytest.raises(ConfigError, match="needs the file"):
        Search(resume=True)


def test_a_line_that_a_full_disk_cut_off_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "search.journal"
    first = run(Troubled(), path=path, trials=3)
    with path.open("ab") as file:
        file.write(b'{"op_code": 4, "worker_')
    second = run(Troubled(), path=path, trials=4, resume=True)
    assert second.trials[:3] == first.trials
    assert run(Troubled(), path=path, trials=4, resume=True).trials == second.trials


def test_two_searches_do_not_share_a_file(tmp_path: Path) -> None:
    path, refused = tmp_path / "search.journal", []

    class Second(Watcher):
        def on_end(self, trial: Trial, best: Trial | None) -> None:
            if not refused:
                with pytest.raises(ConfigError, match="another search writes to") as caught:
                    Study(small_space(), settings={}, path=path, resume=True)
                refused.append(caught.value.param)

    run(Troubled(), path=path, trials=2, watcher=Second())
    assert refused == ["output"]


def test_a_search_that_was_killed_in_a_trial_tries_it_again(tmp_path: Path) -> None:
    path = tmp_path / "search.journal"

    class Killed(BaseException):
        pass

    class Kill(Watcher):
        def on_end(self, trial: Trial, best: Trial | None) -> None:
            pass

        def on_begin(self, number: int, config: Config) -> None:
            if number == 3:
                raise Killed(key_of(config))

    with pytest.raises(Killed) as caught:
        run(Troubled(), path=path, watcher=Kill())
    runner = Troubled()
    result = run(runner, path=path, trials=4, resume=True)
    assert key_of(runner.started[0]) == str(caught.value)
    assert result.num_started == 4
