"""Compiles the C++ drivers of tests/ops/cpu/native with all kernels: for this machine, instrumented, for another one.

    python tests/native_build.py parity [--variant address|thread|aarch64]

prints the program's path. Objects are kept under build/; those of the plain variant are the library's own.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
DRIVERS = ROOT / "tests" / "ops" / "cpu" / "native"

_CPU_FLAGS = {
    "kernels_avx2": {"avx2", "fma", "f16c"},
    "kernels_avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "kernels_avx512vnni": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
}


@dataclass(frozen=True)
class Variant:
    sanitize: str = ""
    cross: str = ""
    """The compiler for another architecture; programs are then linked statically, to be emulated"""
    flags: tuple[str, ...] = ()


VARIANTS = {
    "plain": Variant(),
    # Not optimised: kernels take ten times as long to compile otherwise, and hide less of what they do.
    "address": Variant(sanitize="address,undefined", flags=("-O0",)),
    "thread": Variant(sanitize="thread", flags=("-O0",)),
    "aarch64": Variant(cross="aarch64-linux-gnu-g++", flags=("-O0",)),
}


class CannotBuildError(Exception):
    """A compiler or a sanitizer is not there; the message says which."""


def build_native() -> ModuleType:
    """scripts/build_native.py"""
    name = "build_native"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / "build_native.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def build_driver(driver: str, variant: str = "plain", *, jobs: int = 1, verbose: bool = False) -> Path:
    """The program of tests/ops/cpu/native/`driver`.cpp. Raises `CannotBuildError` where a tool is not there, and
    `BuildError` with the compiler's words."""
    builder = build_native()
    wanted = VARIANTS[variant]
    if wanted.cross:
        if shutil.which(wanted.cross) is None:
            raise CannotBuildError(
                f"{wanted.cross} is not there (on Debian and Ubuntu: apt-get install g++-aarch64-linux-gnu)"
            )
        cxx = [wanted.cross]
    else:
        try:
            cxx = builder.compiler()
        except builder.BuildError as error:
            raise CannotBuildError(str(error)) from None
    extra = [*builder.sanitizer_flags(wanted.sanitize), *wanted.flags]
    directory = ROOT / "build" / ("native" if variant == "plain" else f"native-{variant}")
    driver_objects = ROOT / "build" / f"drivers-{variant}"
    driver_objects.mkdir(parents=True, exist_ok=True)
    if wanted.sanitize:
        probe = driver_objects / "probe"
        probe.with_suffix(".cpp").write_text("int main() { return 0; }\n")
        try:
            builder.run_compiler([*cxx, *extra, str(probe.with_suffix(".cpp"))], probe)
        except builder.BuildError as error:
            raise CannotBuildError(f"this compiler cannot link -fsanitize={wanted.sanitize}: {error}") from None
    missing = _not_executed() if wanted.sanitize else set()
    objects = builder.compile_sources(cxx, directory, extra, leave_out=missing, jobs=jobs, verbose=verbose)
    if missing:  # kernels that this processor cannot execute need no instruments
        others = {source.stem for source in builder.SOURCES.glob("*.cpp")} - missing
        objects |= builder.compile_sources(cxx, ROOT / "build" / "native", leave_out=others, jobs=jobs, verbose=verbose)
    output = driver_objects / driver
    sources = [DRIVERS / f"{driver}.cpp", *sorted(DRIVERS.glob("*.h"))]
    newest = max(
        path.stat().st_mtime
        for path in [*sources, *objects.values(), ROOT / "scripts" / "build_native.py", Path(__file__)]
    )
    if not output.exists() or output.stat().st_mtime < newest:
        command = [*cxx, "-std=c++17", "-O1", "-Wall", "-Wextra", "-ffp-contract=off", "-pthread", *extra]
        command += [f"-I{builder.SOURCES}", str(sources[0]), *map(str, objects.values())]
        builder.run_compiler([*command, *(["-static"] if wanted.cross else [])], output, verbose=verbose)
    return output


def _not_executed() -> set[str]:
    """Instruction sets' files that this processor has no use for."""
    if platform.machine() != "x86_64":
        return set()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    has = {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}
    return {stem for stem, needs in _CPU_FLAGS.items() if not needs <= has}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("driver")
    parser.add_argument("--variant", choices=VARIANTS, default="plain")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    try:
        print(build_driver(args.driver, args.variant, jobs=args.jobs, verbose=args.verbose))
    except (CannotBuildError, build_native().BuildError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
