"""Install torch into this interpreter's environment, without CUDA libraries where there is no NVIDIA GPU.

    python scripts/install_torch.py torch==2.13.0 [INDEX_URL]

On Linux the default package index serves torch's CUDA build, which brings several gigabytes of libraries that a
machine without a GPU never loads. The CPU build is a *local version* (2.13.0+cpu) that the default index does not
have. So, on Linux without a GPU and with no index named:

1. ask for 2.13.0+cpu wherever pip is configured to look: a mirror or a wheel folder that has it is used;
2. otherwise take it from PyTorch's own index of CPU builds;
3. otherwise stop and say what to do. The CUDA build is never the fallback.

A GPU, another system, a named index or a requirement other than `torch==VERSION` is installed as asked. torch comes
alone (`--no-deps`) from an index that is not pip's own: what it depends on is installed with Sol, from pip's own.
Only the standard library is used: this runs before anything is installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"

_PLAIN_VERSION = re.compile(r"torch==[0-9][0-9A-Za-z.]*")
_NOT_THERE = ("No matching distribution found", "Could not find a version that satisfies")


def has_nvidia_gpu(root: Path = Path("/")) -> bool:
    """Whether the kernel shows an NVIDIA GPU, natively or under WSL."""
    wsl_driver = root / "usr" / "lib" / "wsl" / "lib" / "libcuda.so.1"
    return any((root / "dev").glob("nvidia[0-9]*")) or wsl_driver.exists()


def attempts(requirement: str, index: str, *, linux: bool, gpu: bool) -> list[list[str]]:
    """The arguments of `pip install` to try in turn, until one finds torch."""
    if index:
        return [["--no-deps", "--index-url", index, requirement]]
    if gpu or not linux or not _PLAIN_VERSION.fullmatch(requirement):
        return [[requirement]]
    return [["--no-deps", f"{requirement}+cpu"], ["--no-deps", "--index-url", CPU_INDEX, f"{requirement}+cpu"]]


def install(arguments: list[str]) -> tuple[int, str]:
    """Run `pip install`, its progress on stdout as usual; returns its exit code and what it wrote to stderr."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    print("+", " ".join(command), flush=True)
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


def main(argv: list[str]) -> int:
    if not 1 <= len(argv) <= 2:
        print(__doc__, file=sys.stderr)
        return 2
    requirement, index = argv[0], argv[1] if len(argv) == 2 else ""
    plan = attempts(requirement, index, linux=sys.platform == "linux", gpu=has_nvidia_gpu())
    errors = ""
    for arguments in plan:
        code, stderr = install(arguments)
        if code == 0:
            sys.stderr.write(stderr)
            return 0
        errors += stderr
        if not any(text in stderr for text in _NOT_THERE):
            break
    sys.stderr.write(errors)
    print(
        f"\n{requirement} could not be installed (pip's words are above).\n"
        "  Behind a mirror: name an index that has torch: make serve TORCH_INDEX=https://mirror.example/whl/cpu\n"
        "  From a file:     make serve TORCH=/path/to/torch-2.13.0+cpu-...whl\n"
        "  CUDA build:      make serve TORCH_INDEX=https://download.pytorch.org/whl/cu130",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
