"""The fused ops every architecture is written in, and the backends that compute them.

`weights` and `batch` are what the ops take, `program` is the list of ops a model emits, `reference` computes them in
plain torch: the specification and the oracle of every other backend.
"""

from __future__ import annotations

from sol.ops.batch import KVCache, RaggedBatch
from sol.ops.program import EagerExecutor, Executor, Ops, Program, run
from sol.ops.weights import Dense, Linear, Norm, Rope

__all__ = [
    "Dense",
    "EagerExecutor",
    "Executor",
    "KVCache",
    "Linear",
    "Norm",
    "Ops",
    "Program",
    "RaggedBatch",
    "Rope",
    "run",
]
