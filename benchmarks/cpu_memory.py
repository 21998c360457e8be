"""What an engine takes above bare imports, in a process of its own: benchmarks/cpu.py runs this.

    python benchmarks/cpu_memory.py MODEL MAX_MODEL_LEN

Runs itself once to learn which modules an engine loads. Then, in a fresh process, imports those, looks at its memory,
loads the model, fills a context with one request, and looks again. Resident memory, mapped files included. Prints one
JSON object, in bytes: {"imports", "engine", "peak", "weights", "kv_cache"}; `peak` includes what loading needed for a
moment, the last two are what the engine says of itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sol import LLM


def status(field: str) -> int:
    """VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def fill_context(model: str, max_model_len: int) -> LLM:
    from sol import LLM, SamplingParams

    # The engine alone, as its process has it: text is made elsewhere.
    llm = LLM(model=model, max_model_len=max_model_len, skip_tokenizer_init=True)
    generated = 64
    prompt = [1000 + i for i in range(max_model_len - generated)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=generated, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == generated
    return llm  # kept while memory is looked at


def main() -> None:
    model, max_model_len = sys.argv[1], int(sys.argv[2])
    if sys.argv[3:] == ["modules"]:
        llm = fill_context(model, max_model_len)
        print(json.dumps(sorted(sys.modules)))
        del llm
        return
    done = subprocess.run([sys.executable, *sys.argv, "modules"], check=True, capture_output=True, text=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in json.loads(done.stdout.splitlines()[-1]):
            with contextlib.suppress(Exception):  # names that were put there by hand
                importlib.import_module(name)
    gc.collect()
    imports, imports_peak = status("VmRSS"), status("VmHWM")
    llm = fill_context(model, max_model_len)
    info = llm._engine.info
    result = {
        "imports": imports,
        "engine": status("VmRSS") - imports,
        "peak": max(status("VmHWM") - max(imports, imports_peak), status("VmRSS") - imports),
        "weights": info.weight_bytes,
        "kv_cache": info.kv_cache_bytes * max_model_len // (info.num_blocks * info.block_size),
    }
    print(json.dumps(result))
    del llm


if __name__ == "__main__":
    main()
