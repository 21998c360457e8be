"""The C++ driver on this processor: every instruction set it has, kernel by kernel and in whole steps."""

from __future__ import annotations

import subprocess

import pytest
from native_build import CannotBuildError, build_driver


@pytest.mark.timeout(1800)  # a busy machine takes minutes to compile the driver
def test_every_instruction_set_of_this_processor_computes_what_it_should() -> None:
    try:
        program = build_driver("parity")
    except CannotBuildError as error:
        pytest.skip(str(error))
    done = subprocess.run([program, "--thorough"], capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "portable" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(" 0 failed")
