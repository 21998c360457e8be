"""What may be imported where: `sol.LLM` with its five dependencies alone, the HTTP process without torch."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

from sol.models.source import ModelFiles

LLM_NEEDS = ("torch", "numpy", "safetensors", "tokenizers", "jinja2")

PROGRAM = """
import importlib.abc, sys

allowed = set({allowed!r})


class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)


sys.meta_path.insert(0, Blocker())
{code}
"""


def closure(packages: tuple[str, ...]) -> set[str]:
    """The packages and everything their own requirements (without extras) bring, as distribution names."""
    found: set[str] = set()
    waiting = list(packages)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform or Python
        waiting += [re.split(r"[^A-Za-z0-9._-]", r)[0] for r in requirements if "extra ==" not in r]
    return found


def import_names(distributions: set[str]) -> set[str]:
    by_distribution: dict[str, set[str]] = {}
    for module, owners in importlib.metadata.packages_distributions().items():
        for owner in owners:
            by_distribution.setdefault(re.sub(r"[-_.]+", "-", owner).lower(), set()).add(module)
    return set().union(*(by_distribution.get(name, set()) for name in distributions))


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_llm_needs_its_five_dependencies_alone(smollm2: ModelFiles) -> None:
    # tokenizers requires huggingface-hub to load from the hub; Sol loads from files, and must not need it.
    distributions = closure(LLM_NEEDS) - closure(("huggingface-hub",)) | closure(tuple(set(LLM_NEEDS) - {"tokenizers"}))
    allowed = import_names(distributions) | {"sol", "torch", "tokenizers"}
    assert not allowed & {"huggingface_hub", "rich", "tqdm", "zmq", "msgspec", "pydantic", "starlette", "transformers"}
    code = f"""
import sol
llm = sol.LLM({str(smollm2.gguf)!r}, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32)
greedy = sol.SamplingParams(temperature=0, max_tokens=2)
assert llm.generate("The capital of France is", greedy)[0].outputs[0].text.startswith(" Paris")
assert llm.chat([{{"role": "user", "content": "Hi"}}], greedy)[0].outputs[0].text
"""
    run(PROGRAM.format(allowed=sorted(allowed), code=code))


def test_sol_itself_imports_nothing_heavy() -> None:
    run(
        "import sys, sol\n"
        "sol.SamplingParams(temperature=0)\n"
        "assert not {'torch', 'numpy', 'tokenizers', 'jinja2', 'safetensors'} & sys.modules.keys()"
    )


def test_the_http_process_has_no_torch() -> None:
    root = Path(__file__).parents[1] / "sol"
    modules = [
        f"sol.{package}.{path.stem}"
        for package in ("server", "text", "engine")
        for path in sorted((root / package).glob("*.py"))
        if path.stem != "__init__"
    ]
    assert "sol.server.app" in modules
    imports = "".join(f"import {module}\n" for module in [*modules, "sol.cli.serve"])
    run(
        f"import sys\n{imports}"
        "heavy = {'torch', 'transformers', 'triton', 'sol.runner', 'sol.ops', 'sol.sampling', 'sol.assemble'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )


def test_every_module_can_be_imported_alone() -> None:
    """No cycle that only works in one order."""
    root = Path(__file__).parents[1]
    names = [
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((root / "sol").rglob("*.py"))
        if path.stem != "__main__"
    ]
    run(
        "import sys, importlib\n"
        f"for name in {names!r}:\n"
        "    for loaded in [m for m in sys.modules if m == 'sol' or m.startswith('sol.')]:\n"
        "        del sys.modules[loaded]\n"
        "    importlib.import_module(name)\n"
    )
