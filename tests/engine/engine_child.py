"""An engine's process for the tests of `ProcessClient`: the real `run_engine` around the token runner.

    engine_child.py MODE

`parent` is the other side: a program that starts such an engine and then waits to be killed.
"""

from __future__ import annotations

import os
import select
import sys
import tempfile
import time
from pathlib import Path

from token_runner import FailingRunner, TokenRunner, make_config, make_core

from sol.config import EngineConfig
from sol.engine.core import EngineCore
from sol.engine.process import ProcessClient, run_engine
from sol.engine.types import SchedulerOutput, StepOutput
from sol.errors import UnsupportedModelError

MAX_MODEL_LEN = 4096


class SlowRunner(TokenRunner):
    """A millisecond a step, so that a stream is still running when the test acts."""

    def execute(self, plan: SchedulerOutput) -> StepOutput:
        time.sleep(0.001)
        return super().execute(plan)


class StuckRunner(TokenRunner):
    """Never comes back from its first step."""

    def execute(self, plan: SchedulerOutput) -> StepOutput:
        time.sleep(3600)
        raise AssertionError


RUNNERS = {"failing": FailingRunner, "stuck": StuckRunner}


def build(engine_config: EngineConfig) -> EngineCore:
    mode = sys.argv[1]
    if mode == "unsupported":
        raise UnsupportedModelError(f"{engine_config.model} is of no kind", param="model")
    if mode == "broken":
        raise ZeroDivisionError("no luck")
    if mode == "exits":
        os._exit(7)
    if mode == "loading":
        time.sleep(3600)
    print("what an engine prints goes to stderr")
    config = make_config(
        max_model_len=engine_config.max_model_len or MAX_MODEL_LEN, num_blocks=512, block_size=engine_config.block_size
    )
    return make_core(config, RUNNERS.get(mode, SlowRunner)(config))


def parent(mode: str) -> None:
    client = ProcessClient(EngineConfig(), command=[sys.executable, __file__, mode])
    print(client.pid, flush=True)
    time.sleep(3600)


def wait_for_stdin(events: int) -> None:
    poll = select.poll()
    poll.register(0, events)
    poll.poll()


if __name__ == "__main__":
    if sys.argv[1] == "parent":
        parent(sys.argv[2])
    else:
        if sys.argv[1] == "importing":
            wait_for_stdin(select.POLLIN)
            Path(tempfile.gettempdir(), "importing").touch()
            wait_for_stdin(0)  # until the parent is dead
        run_engine(build)
