"""The configuration of an engine that does the most within an SLO: `sol tune`.

    runner = SimulatedRunner(profile("h100-8b"), parse_slo(slo))
    result = asyncio.run(tune(runner, simulated_space(laws), Goal.of(slo), search=Search(trials=40)))
    print(result.best.config, result.best.score)

`space` says what may vary; a `Runner` (`simulated`, `servers`) starts a configuration; `loads` finds the greatest rate
at which it meets the SLO; `study` proposes the next and writes all down; `constraints`, `roofline` and `quality` say
which need not be started; `tuner` is the loop; `report` and `output` say what came of it.
"""

from sol.tune.simulated import SimulatedRunner, Workload, simulated_space
from sol.tune.space import Config, Parameter, Space
from sol.tune.trial import Goal, Probe, Runner, Running, Trial, TrialCrash
from sol.tune.tuner import Search, TuneResult, Watcher, exhaustive, tune

__all__ = [
    "Config", "Goal", "Parameter", "Probe", "Runner", "Running", "Search", "SimulatedRunner", "Space", "Trial",
    "TrialCrash", "TuneResult", "Watcher", "Workload", "exhaustive", "simulated_space", "tune",
]  # fmt: skip
