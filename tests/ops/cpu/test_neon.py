"""The NEON kernels, cross-compiled and run by an emulator: the same driver as on this processor."""

from __future__ import annotations

import platform
import shutil
import subprocess

import pytest
from native_build import CannotBuildError, build_driver


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(platform.machine() == "aarch64", reason="this processor runs them itself: see test_native_parity")
def test_neon_kernels_under_emulation() -> None:
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("qemu-aarch64 is not there (on Debian and Ubuntu: apt-get install qemu-user)")
    try:
        program = build_driver("parity", "aarch64")
    except CannotBuildError as error:
        pytest.skip(str(error))
    done = subprocess.run([emulator, program], capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "neon" in done.stdout  # the emulated processor has the dot product
    assert done.stdout.splitlines()[-1].endswith(" 0 failed")
