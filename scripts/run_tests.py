"""Run pytest, and what failed once more alone.

    python scripts/run_tests.py [pytest's arguments]

Tests share the machine with each other, and some talk to real processes: a test that fails only when everything else
runs is a fault of the test, but not of the change at hand. So up to `MOST` failed tests are run again, one after the
other, with nothing beside them. What fails again fails the run. What passes is named at the end, to be mended: it
depends on time somewhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 5
"""More than this many failures are no coincidence."""

_LAST_FAILED = Path(__file__).resolve().parent.parent / ".pytest_cache" / "v" / "cache" / "lastfailed"
_TESTS_FAILED = 1  # pytest's exit codes: https://docs.pytest.org/en/stable/reference/exit-codes.html


def main(arguments: list[str]) -> int:
    _LAST_FAILED.unlink(missing_ok=True)
    code = _pytest(arguments)
    if code != _TESTS_FAILED:
        return code
    failed = sorted(json.loads(_LAST_FAILED.read_text())) if _LAST_FAILED.exists() else []
    if not 0 < len(failed) <= MOST:
        return code
    print(f"\n{len(failed)} failed: once more, with nothing beside them.\n", flush=True)
    # By name, not with --last-failed: a test that was not collected again must not count as passed.
    code = _pytest(["-n", "0", "-m", "", *failed])
    if code == 0:
        print("\nThese failed beside others and passed alone. They depend on time, and want mending:")
        print("".join(f"  {name}\n" for name in failed), end="", flush=True)
    return code


def _pytest(arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
