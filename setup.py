"""Builds the CPU kernels with the package. Everything else about it is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def _builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_native", ROOT / "scripts" / "build_native.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _jobs() -> int:
    """Files compiled at once: MAX_JOBS, else one for each core that this process may use."""
    wanted = os.environ.get("MAX_JOBS", "")
    return max(1, int(wanted)) if wanted.isdecimal() else len(os.sched_getaffinity(0))


class BuildNative(build_ext):
    """One shared library, loaded with ctypes: no Python ABI in its name, no Python headers.

    Without a compiler the installation succeeds all the same: Sol then computes with torch, and `sol doctor` says what
    is lost and how to get it.
    """

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        builder = _builder()
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            builder.build(target, jobs=_jobs())
        except (builder.BuildError, OSError) as error:
            target.unlink(missing_ok=True)
            if self.editable_mode or self.inplace:  # kernels of another version are worse than none
                (ROOT / self.get_ext_filename(ext.name)).unlink(missing_ok=True)
            self.warn(
                f"the CPU kernels were not built: {error}\nSol works without them, several times slower on "
                "a CPU. Install a C++17 compiler, then install Sol again."
            )

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            built = Path(self.build_lib) / self.get_ext_filename(ext.name)
            if built.exists():
                inplace = ROOT / self.get_ext_filename(ext.name)
                temporary = inplace.with_suffix(".so.new")
                shutil.copy2(built, temporary)
                temporary.replace(inplace)  # a running engine keeps the file that it has mapped


setup(
    ext_modules=[Extension("sol.ops.cpu._native", sources=[], optional=True)],
    cmdclass={"build_ext": BuildNative},
)
