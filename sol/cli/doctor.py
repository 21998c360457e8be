"""Exit code 1 if something is wrong. Example: sol doctor org/name --dtype bfloat16 --max-model-len 4K"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sol.cli.arguments import add_engine_arguments, add_model_argument, engine_config
from sol.cli.units import size

if TYPE_CHECKING:
    from rich.console import Console

    from sol.cli.diagnosis import Diagnosis, Settings
    from sol.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)

    from sol.cli.diagnosis import diagnose

    diagnosis = diagnose(config)
    if args.json:
        print(json.dumps(dataclasses.asdict(diagnosis), indent=2))
    else:
        from rich.console import Console

        _print(diagnosis, config, Console(highlight=False, markup=False, soft_wrap=True))
    return 1 if diagnosis.problems else 0


def _print(diagnosis: Diagnosis, config: EngineConfig, console: Console) -> None:
    machine, model, settings = diagnosis.machine, diagnosis.model, diagnosis.settings
    memory = f"{size(machine.memory_bytes)}, {size(machine.available_bytes)} available"
    if machine.memory_limit_bytes is not None:
        memory += f", limited to {size(machine.memory_limit_bytes)} by the cgroup"
    section(console, "This machine", [
        ("system", f"{machine.os}; Python {diagnosis.python}"),
        ("processor", f"{machine.cpu} ({', '.join(machine.instruction_sets) or 'no vector instructions known'})"),
        ("cores", f"{machine.usable_cores:g} usable of {machine.cores}"),
        ("memory", memory),
        *(("GPU", f"{gpu.name}, {size(gpu.memory_bytes)}, compute capability {gpu.compute_capability}")
          for gpu in diagnosis.gpus),
        ("NVIDIA driver", machine.nvidia_driver or "none"),
        ("packages", ", ".join(f"{name} {version}" for name, version in diagnosis.packages.items() if version)),
    ])  # fmt: skip
    if model is not None:
        section(console, f"The model {model.name}", [
            ("where", f"{model.path}, {size(model.file_bytes)}"),
            ("what", f"{model.architecture}, {model.parameters / 1e6:,.1f} million parameters, "
                     f"up to {model.max_position_embeddings:,} tokens"),
            ("quantised", model.quantization or "no"),
            ("weights", by_dtype(model.weight_bytes)),
            ("KV cache", f"{by_dtype(model.kv_bytes_per_token)}, for each token"),
        ])  # fmt: skip
    if settings is not None:
        longest = config.max_model_len or (0 if model is None else model.max_position_embeddings)
        cut = f" (cut from {longest:,} to what fits)" if settings.max_model_len < longest else ""
        section(console, "What Sol will use", [
            ("device", f"{settings.device}, {settings.dtype}, {settings.threads} threads"),
            ("kernels", "torch's" if settings.kernels == "torch" else f"C++, {settings.kernels}"),
            ("memory", f"{size(settings.memory_budget)} at most: weights {size(settings.weights)}, workspace "
                       f"{size(settings.workspace)}, KV cache {size(settings.kv_cache)}"),
            ("KV cache", f"{settings.kv_cache_tokens:,} tokens: {settings.full_length_requests:.1f} requests "
                         f"of the full {settings.max_model_len:,}{cut}"),
            ("a step", f"up to {settings.max_num_seqs} requests and {settings.max_num_batched_tokens:,} tokens, "
                       f"{settings.max_num_prefill_tokens:,} of prompts while others decode"),
            ("speculation", _speculation(settings)),
        ])  # fmt: skip
    if not diagnosis.problems:
        console.print("No problems found.", style="green")
    for problem in diagnosis.problems:
        console.print(f"Problem: {problem.what}", style="red")
        if problem.remedy:
            console.print(f"  Remedy: {problem.remedy}")


def _speculation(settings: Settings) -> str:
    if not settings.drafters:
        return "off"
    drafters = " and ".join(settings.drafters)
    model = f" ({settings.speculative_model})" if settings.speculative_model else ""
    return f"drafts by {drafters}{model}, up to {settings.num_speculative_tokens} for a request in a step"


def section(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    console.print(title, style="bold")
    for name, text in rows:
        console.print(f"  {name:<14} {text}")
    console.print()


def by_dtype(amounts: dict[str, int]) -> str:
    """Dtypes that cost the same together: "513.1 MiB in float32, 256.6 MiB in float16 or bfloat16"."""
    names: dict[int, list[str]] = {}
    for name, amount in amounts.items():
        names.setdefault(amount, []).append(name)
    return ", ".join(f"{size(amount)} in {' or '.join(group)}" for amount, group in names.items())
