"""What `sol doctor` finds out: the machine, what Sol would use of it, what a model costs, and what is wrong."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, field

from sol.cli.machine import Machine, inspect_machine, package_versions
from sol.config import EngineConfig
from sol.errors import SolError
from sol.version import __version__


@dataclass(frozen=True, slots=True)
class Problem:
    what: str
    remedy: str = ""
    """Empty where `what` says it already, as Sol's own errors do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    memory_bytes: int
    compute_capability: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Memory in bytes, lengths in tokens."""

    name: str
    path: str
    """The file or folder on this machine."""
    architecture: str
    quantization: str | None
    """How the checkpoint is quantised, or `--quantization` will quantise it; None: it is not."""
    parameters: int
    file_bytes: int
    max_position_embeddings: int
    weight_bytes: dict[str, int]
    """Once loaded, by dtype."""
    kv_bytes_per_token: dict[str, int]
    """By dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an engine with this configuration would use. Memory in bytes, lengths in tokens."""

    device: str
    dtype: str
    kernels: str
    """What computes: `torch`, `triton` (a GPU's kernels), or the instruction set of the C++ kernels."""
    threads: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prefill_tokens: int
    memory_budget: int
    weights: int
    workspace: int
    kv_cache: int
    kv_cache_tokens: int
    full_length_requests: float
    """How many requests of max_model_len tokens fit at once."""
    drafters: tuple[str, ...]
    """Who drafts; nobody where speculation is off."""
    speculative_model: str | None
    num_speculative_tokens: int
    """The most drafts that a step verifies for a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    sol: str
    python: str
    machine: Machine
    gpus: list[Gpu]
    packages: dict[str, str | None]
    settings: Settings | None
    """None if the configuration cannot work here; `problems` says why."""
    model: ModelCost | None
    problems: list[Problem] = field(default_factory=list)


def diagnose(config: EngineConfig) -> Diagnosis:
    """Never raises for what a user can mend: that is what `problems` is for. Fetches the model if it is not here."""
    machine, packages = inspect_machine(), package_versions()
    problems = _package_problems(packages) + _cpu_problems(machine)
    gpus: list[Gpu] = []
    settings: Settings | None = None
    model: ModelCost | None = None
    try:
        gpus = _gpus()
        problems += _gpu_problems(machine, gpus)
        model = _model_cost(config)
        problems += _kernel_problems(config)
        settings = _settings(config)
    except SolError as error:
        problems.append(Problem(error.message))
    except (ImportError, OSError) as error:
        # torch is missing, or was built for libraries that are; `packages` tells the former.
        if packages.get("torch") is not None:
            problems.append(Problem(f"a package cannot be imported: {error}", "make clean, then make install"))
    return Diagnosis(
        sol=__version__,
        python=platform.python_version(),
        machine=machine,
        gpus=gpus,
        packages=packages,
        settings=settings,
        model=model,
        problems=problems,
    )


def _package_problems(packages: dict[str, str | None]) -> list[Problem]:
    missing = sorted(name for name, version in packages.items() if version is None)
    if not missing:
        return []
    return [Problem(f"not installed: {', '.join(missing)}", 'pip install "sol-inference[serve]"')]


def _cpu_problems(machine: Machine) -> list[Problem]:
    if platform.machine() in ("x86_64", "AMD64") and "avx2" not in machine.instruction_sets:
        return [
            Problem(
                "this processor shows no AVX2: matrix products are several times slower than on one that has it",
                "in a virtual machine, pass the host's CPU model through; else use a processor made after 2015",
            )
        ]
    return []


def _kernel_problems(config: EngineConfig) -> list[Problem]:
    from sol.runner.cpu_kernels import unavailable
    from sol.runner.device import resolve_device

    device = resolve_device(config.device)
    if device.type != "cpu" or config.cpu_kernels != "auto":
        return []
    reason = unavailable(config, device)
    if reason is None:
        return []
    return [
        Problem(
            "torch computes in place of Sol's C++ kernels: decoding is several times slower, quantised weights are "
            f"expanded to {config.dtype if config.dtype != 'auto' else 'float32'} in memory, and the KV cache has no "
            "other type",
            reason,
        )
    ]


def _gpu_problems(machine: Machine, gpus: list[Gpu]) -> list[Problem]:
    if machine.nvidia_driver is None or gpus:
        return []
    import torch

    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    return [
        Problem(
            f"the NVIDIA driver {machine.nvidia_driver} is there, but torch {torch.__version__} ({build}) finds no GPU",
            "install a CUDA build that the driver supports: make clean, then make install "
            "TORCH_INDEX=https://download.pytorch.org/whl/cu130 (or an older one, see nvidia-smi)",
        )
    ]


def _gpus() -> list[Gpu]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            Gpu(
                name=properties.name,
                memory_bytes=properties.total_memory,
                compute_capability=f"{properties.major}.{properties.minor}",
            )
        )
    return found


def _model_cost(config: EngineConfig) -> ModelCost:
    from sol.models.config import load_model_config
    from sol.models.dummy_checkpoint import parameter_shapes
    from sol.models.source import resolve_configured
    from sol.runner.device import DTYPES
    from sol.runner.memory import kv_bytes_per_token

    files = resolve_configured(config)
    model = load_model_config(files)
    parameters = sum(math.prod(shape) for shape in parameter_shapes(model).values())
    weights = files.safetensors if files.gguf is None else (files.gguf,)
    return ModelCost(
        name=files.name,
        path=str(files.gguf or files.root),
        architecture=model.architecture,
        quantization=config.quantization if model.quantization is None else str(model.quantization),
        parameters=parameters,
        file_bytes=sum(path.stat().st_size for path in weights),
        max_position_embeddings=model.max_position_embeddings,
        weight_bytes={name: parameters * dtype.itemsize for name, dtype in DTYPES.items()},
        kv_bytes_per_token={name: kv_bytes_per_token(model, dtype) for name, dtype in DTYPES.items()},
    )


def _torch_or_triton(device: str) -> str:
    return "triton" if device == "cuda" else "torch"


def _settings(config: EngineConfig) -> Settings:
    from sol.assemble import plan

    settled = plan(config)
    memory = settled.memory
    speculative = config.speculative()
    return Settings(
        device=str(settled.device),
        dtype=str(settled.dtype).removeprefix("torch."),
        kernels=settled.kernels.isa.name.lower()
        if settled.kernels is not None
        else _torch_or_triton(settled.device.type),
        threads=settled.threads,
        max_model_len=memory.max_model_len,
        max_num_seqs=settled.max_num_seqs,
        max_num_batched_tokens=settled.max_num_batched_tokens,
        max_num_prefill_tokens=settled.max_num_prefill_tokens,
        memory_budget=memory.budget,
        weights=memory.weights,
        workspace=memory.workspace,
        kv_cache=memory.kv_cache,
        kv_cache_tokens=memory.kv_tokens,
        full_length_requests=memory.full_length_requests,
        drafters=speculative.drafters,
        speculative_model=speculative.model,
        num_speculative_tokens=speculative.num_speculative_tokens if speculative.drafters else 0,
    )
