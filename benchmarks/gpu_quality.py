"""How far a GPU's 16-bit kernels move SmolLM2-135M from the float32 reference on a CPU: the likeliest next token.

    python benchmarks/gpu_quality.py [--model MODEL] [--json FILE]

The text is quality_text.txt (of this project: English, tables, Python), cut into chunks of 512 tokens, each evaluated
from an empty context and teacher-forced: the next token is the text's, whatever either engine finds likelier. The same
weights are multiplied in float32 by the torch reference, and in the GPU's type by its kernels, which meet the tokens
in three ways: all chunks as prompts, eight tokens of each at a time as verification has them, and one of each as
decoding has them. So the kernels of few tokens, cuBLAS and both kernels of attention take part.

Counted are the positions at which the likeliest token is another one, and by how much the reference prefers its own
there: the largest such gap of logits. The bars hold for the type of the checkpoint's weights, which is what the engine
takes unless it is told otherwise; the other type's figures stand beside. On a machine without a GPU the reference in
16 bits takes the kernels' place, which says what rounding alone does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sol.config import DEFAULT_MODEL
from sol.models.checkpoint import open_checkpoint
from sol.models.config import ModelConfig, load_model_config
from sol.models.registry import load_program
from sol.models.source import resolve
from sol.ops import KVCache, Ops, Program, RaggedBatch, run
from sol.ops.reference import ReferenceOps
from sol.runner.device import resolve_dtype
from sol.text.tokenizer import Tokenizer

CHUNK = 512
BLOCK_SIZE = 16
WAYS = {"prompts": CHUNK, "eight at a time": 8, "one at a time": 1}
AGREEMENT, GAP = 0.99, 0.1


def logits(
    program: Program, ops: Ops, model: ModelConfig, chunks: torch.Tensor, count: int, device: torch.device
) -> torch.Tensor:
    """[chunks, CHUNK, vocabulary] float32 on the device, `count` tokens of every chunk at a time."""
    requests = chunks.shape[0]
    blocks = CHUNK // BLOCK_SIZE
    shape = (model.num_hidden_layers, 2, requests * blocks, BLOCK_SIZE, model.num_key_value_heads, model.head_dim)
    cache = KVCache(torch.zeros(shape, dtype=program.final_norm.weight.dtype, device=device))
    table = torch.randperm(requests * blocks).view(requests, blocks)
    out = torch.empty(requests, CHUNK, model.vocab_size, device=device)
    for start in range(0, CHUNK, count):
        positions = torch.arange(start, start + count)
        slots = table[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = RaggedBatch(
            token_ids=chunks[:, start : start + count].flatten().to(device),
            positions=positions.repeat(requests).to(device),
            slot_mapping=slots.flatten().to(device),
            block_table=table.to(device),
            query_lens=[count] * requests,
            seq_lens=[start + count] * requests,
            logits_rows=torch.arange(requests * count, device=device),
        )
        out[:, start : start + count] = run(program, ops, batch, cache).view(requests, count, -1)
    return out


def compare(expected: torch.Tensor, found: torch.Tensor) -> dict[str, Any]:
    """Of logits [chunks, CHUNK, vocabulary]: how often the likeliest token is the same, and the widest gap else."""
    best, choice = expected.max(-1)
    chosen = found.argmax(-1)
    gaps = (best - expected.gather(-1, chosen.unsqueeze(-1)).squeeze(-1))[chosen != choice]
    log_p, log_q = expected.log_softmax(-1), found.log_softmax(-1)
    return {
        "tokens": choice.numel(),
        "same_top_1": round(1 - gaps.numel() / choice.numel(), 5),
        "others": gaps.numel(),
        "largest_gap": round(float(gaps.max()) if gaps.numel() else 0.0, 4),
        "kl": float(f"{float((log_p.exp() * (log_p - log_q)).sum(-1).mean()):.3g}"),
    }


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--chunks", type=int, help="at most so many")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    files = resolve(args.model)
    model = load_model_config(files)
    text = Path(__file__).with_name("quality_text.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_files(files).encode(text)
    chunks = torch.tensor(ids[: len(ids) // CHUNK * CHUNK]).view(-1, CHUNK)[: args.chunks]

    def load(dtype: torch.dtype, where: torch.device) -> Program:
        return load_program(model, open_checkpoint(files), dtype=dtype, device=where, max_positions=CHUNK)

    make_ops: Callable[[], Ops] = ReferenceOps
    if device.type == "cuda":
        from sol.ops.gpu.ops import GpuOps

        make_ops = lambda: GpuOps(device)  # noqa: E731
    began = time.perf_counter()
    cpu = torch.device("cpu")
    expected = logits(load(torch.float32, cpu), ReferenceOps(), model, chunks, CHUNK, cpu).to(device)
    print(f"# reference: {chunks.numel()} tokens, {time.perf_counter() - began:.1f} s", flush=True)
    rows = []
    own = resolve_dtype("auto", torch.device("cuda"), model.torch_dtype)
    for dtype in (torch.bfloat16, torch.float16):
        program = load(dtype, device)
        for way, count in WAYS.items():
            found = logits(program, make_ops(), model, chunks, count, device)
            row = {"dtype": str(dtype).removeprefix("torch."), "own": dtype == own, "way": way}
            row |= compare(expected, found)
            row["holds"] = row["same_top_1"] >= AGREEMENT and row["largest_gap"] <= GAP
            rows.append(row)
            print(json.dumps(row), flush=True)
            del found
    result = {
        "benchmark": "gpu_quality",
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "none",
        "versions": {"torch": torch.__version__},
        "model": files.name if files.gguf is None else files.gguf.name,
        "bars": {"same_top_1": AGREEMENT, "largest_gap": GAP},
        "rows": rows,
    }
    if device.type == "cuda":
        result["versions"]["triton"] = __import__("triton").__version__
    if args.json is not None:
        args.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0 if all(row["holds"] for row in rows if row["own"]) else 1


if __name__ == "__main__":
    sys.exit(main())
