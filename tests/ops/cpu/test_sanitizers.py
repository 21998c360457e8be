"""The kernels under the address, undefined-behaviour and thread sanitizers, driven by the C++ drivers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from native_build import CannotBuildError, build_driver

pytestmark = pytest.mark.timeout(3600)  # a busy machine takes minutes to compile instrumented kernels

OPTIONS = {
    # What the fuzzer asks for may be more memory than there is: the library has to cope with a null pointer.
    "ASAN_OPTIONS": "allocator_may_return_null=1:max_allocation_size_mb=1024:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


def built(driver: str, variant: str) -> Path:
    try:
        return build_driver(driver, variant)
    except CannotBuildError as error:
        pytest.skip(str(error))


def passes(program: Path, *arguments: str) -> None:
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, timeout=3000, env={**os.environ, **OPTIONS}
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert done.stdout.splitlines()[-1].endswith(" 0 failed")


@pytest.mark.slow
def test_kernels_and_steps_stay_inside_their_memory() -> None:
    passes(built("parity", "address"))


@pytest.mark.parametrize(("seed", "iterations"), [("1", "2000"), pytest.param("2", "40000", marks=pytest.mark.slow)])
def test_damaged_weights_and_lying_sizes_are_refused_or_harmless(seed: str, iterations: str) -> None:
    passes(built("fuzz", "address"), "--seed", seed, "--iterations", iterations)


@pytest.mark.slow
def test_threads_of_a_step_do_not_race() -> None:
    passes(built("parity", "thread"), "--threads", "6")
