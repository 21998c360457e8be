"""Compiles sol/ops/cpu/csrc into one shared library with a C ABI; what setup.py and `make native` run.

Needs a C++17 compiler and nothing else: no headers of Python or torch, no libraries, no downloads. CXX names the
compiler (default: the first of c++, g++ and clang++); which instruction sets are built follows from its target, each in
a file of its own with flags of its own. Objects are kept under build/native by a hash of what they are made from, so
that only what changed is compiled again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "sol" / "ops" / "cpu" / "csrc"
LIBRARY = ROOT / "sol" / "ops" / "cpu" / "_native.so"

COMPILE = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-pthread", "-Wall",
           "-Wno-psabi", "-ffp-contract=off"]  # fmt: skip
"""Contraction off: which products are fused into an addition is what the source says, on every compiler."""
LINK = ["-shared", "-pthread", "-Wl,-z,defs", "-Wl,-z,noexecstack"]

AVX512 = ["-mavx2", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c", "-mfma"]
ISA_FLAGS = {
    "x86_64": {
        "kernels_avx2": ["-mavx2", "-mfma", "-mf16c"],
        "kernels_avx512": AVX512,
        "kernels_avx512vnni": [*AVX512, "-mavx512vnni"],
    },
    "aarch64": {"kernels_neon": ["-march=armv8.2-a+dotprod"]},
}
"""By architecture: the files that use more than its baseline. A file named for another architecture is left out."""
_ALL_ISAS = {name for flags in ISA_FLAGS.values() for name in flags}


class BuildError(Exception):
    """No compiler, or one that failed; the message says what to do."""


def compiler() -> list[str]:
    """The command that compiles C++. Raises `BuildError` where there is none."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    if wanted:
        if shutil.which(wanted[0]) is None:
            raise BuildError(f"CXX is {wanted[0]!r}, which is not there")
        return wanted
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name) is not None:
            return [name]
    raise BuildError("there is no C++ compiler: install g++ or clang++ (on Debian and Ubuntu: apt-get install g++)")


def build(
    output: Path, *, sanitize: str = "", objects: Path | None = None, jobs: int = 1, verbose: bool = False
) -> Path:
    """Builds `output`, compiling what changed. Raises `BuildError` with the compiler's own words."""
    cxx = compiler()
    extra = sanitizer_flags(sanitize)
    objects = objects or ROOT / "build" / ("native-sanitized" if sanitize else "native")
    made = compile_sources(cxx, objects, extra, jobs=jobs, verbose=verbose)
    run_compiler([*cxx, *LINK, *extra, *map(str, made.values())], output, verbose=verbose)
    return output


def sanitizer_flags(sanitize: str) -> list[str]:
    """What compiles and links instrumented code; `sanitize` as for -fsanitize, empty for none."""
    return [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"] if sanitize else []


def compile_sources(
    cxx: Sequence[str],
    objects: Path,
    extra: Sequence[str] = (),
    *,
    leave_out: Collection[str] = (),
    jobs: int = 1,
    verbose: bool = False,
) -> dict[str, Path]:
    """The objects of all sources, by the sources' stems; those that changed are compiled, `jobs` at a time. `objects`
    belongs to one compiler and one set of flags. Raises `BuildError`."""
    machine = _output([*cxx, "-dumpmachine"]).partition("-")[0]
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    identity = _output([*cxx, "--version"]) + machine
    headers = b"".join(path.name.encode() + path.read_bytes() for path in sorted(SOURCES.glob("*.h")))
    made: dict[str, Path] = {}
    commands = []
    for source in sorted(SOURCES.glob("*.cpp")):
        isa_flags = ISA_FLAGS.get(machine, {}).get(source.stem, [])
        if (source.stem in _ALL_ISAS and not isa_flags) or source.stem in leave_out:
            continue
        flags = [*COMPILE, *extra, *isa_flags]
        digest = hashlib.blake2b(
            b"\0".join([identity.encode(), " ".join(flags).encode(), source.read_bytes(), headers]), digest_size=12
        ).hexdigest()
        target = objects / source.stem / f"{digest}.o"
        if not target.exists():
            commands.append(([*cxx, *flags, "-c", str(source)], target))
        made[source.stem] = target
    if not made:
        raise BuildError(f"there are no sources in {SOURCES}")
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(lambda command: run_compiler(*command, verbose=verbose), commands):
            pass
    for _, target in commands:
        for old in target.parent.glob("*.o"):
            if old != target:
                old.unlink(missing_ok=True)
    return made


def run_compiler(command: list[str], output: Path, *, verbose: bool = False) -> None:
    """Runs the command with a temporary output and renames it, so that nobody ever sees half a file."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    command = [*command, "-o", str(temporary)]
    if verbose:
        print(shlex.join(command), flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
        if done.stderr.strip():
            print(done.stderr.strip(), file=sys.stderr)
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=LIBRARY)
    parser.add_argument("--sanitize", default="", help="address,undefined or thread: instrument the code")
    parser.add_argument("--jobs", type=int, default=1, help="how many files to compile at once (default: 1)")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    try:
        print(build(args.output, sanitize=args.sanitize, jobs=args.jobs, verbose=args.verbose))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
