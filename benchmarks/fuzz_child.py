"""One target of `server_fuzz.py`, in a process of its own: python benchmarks/fuzz_child.py TARGET INPUTS SEED DIRECTORY

Exits with 0, or otherwise after the input that failed was written to DIRECTORY. Imports nothing of Sol before coverage
can see it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
from pathlib import Path
from typing import Any, Final

LIMIT: Final = 30
"""Seconds for an input."""
MEMORY_MIB: Final = 3072
LONGEST: Final[dict[str, int]] = {
    "templates": 4_000, "tool_calls": 1_000, "gguf": 24_000, "grammars": 2_000, "bodies": 4_000, "streams": 1_000,
}  # fmt: skip
"""Bytes of an input: what is long is slow, and says no more."""
_INSTRUMENTED: Final = ("sol.text", "sol.models", "sol.server", "sol.gateway.relay", "sol.bench.stream", "sol.grammar")


def guidance() -> Any:
    """The module `atheris`, None if it is not installed."""
    if importlib.util.find_spec("atheris") is None:
        return None
    import atheris

    return atheris


def fuzz(name: str, inputs: int, seed: int, directory: Path) -> None:
    atheris = guidance()
    with atheris.instrument_imports(include=list(_INSTRUMENTED)) if atheris else contextlib.nullcontext():
        from fuzz_targets import TARGETS, mutate

    from fuzz_seeds import WORDS

    from sol.text import template_sandbox

    template_sandbox.MAX_SECONDS = 0.5  # type: ignore[misc]  # or the slowest would be all there is time for
    target, words = TARGETS[name], WORDS[name]
    if atheris is None:
        random_ = random.Random(seed)
        for number in range(inputs):
            data = target.seeds[number % len(target.seeds)]
            if number >= len(target.seeds):
                data = mutate(random_, data, words, target.seeds)
            (directory / "failed-last").write_bytes(data)
            target.run(data[: LONGEST[name]])
        print(f"stat::number_of_executed_units: {inputs}", file=sys.stderr)
        return
    corpus = directory / "corpus"
    corpus.mkdir()
    for number, data in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(data)
    dictionary = directory / "words"
    dictionary.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in words))
    options = {
        "runs": inputs, "seed": seed, "timeout": LIMIT, "rss_limit_mb": MEMORY_MIB, "max_len": LONGEST[name],
        "dict": dictionary, "artifact_prefix": f"{directory}/failed-", "print_final_stats": 1,
    }  # fmt: skip

    def mutated(data: bytes, most: int, number: int) -> bytes:
        """libFuzzer's own way as often as ours, which knows what the formats are made of."""
        random_ = random.Random(number)
        if random_.random() < 0.5:
            return bytes(atheris.Mutate(data, most))
        return mutate(random_, data, words, target.seeds)[:most]

    flags = [f"-{option}={value}" for option, value in options.items()]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], target.run, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
