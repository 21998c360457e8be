"""What a verifying step costs on a GPU: a forward pass of several tokens each of several requests.

    python benchmarks/gpu_verify.py --json benchmarks/results/h200-verify-costs.json

Speculative decoding verifies k proposed tokens and the one they follow in one step, so `tokens_per_request` is k + 1.
Seconds of the device, of a forward pass with logits of all tokens, replayed from a CUDA graph; sampling and the host
are not in them. Llama-3-8B's shape in bfloat16 with random weights, as in gpu.py, and every request's context is as
long as `--context` says, this step's tokens included. Steps of more than `--most` tokens are left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import replace
from pathlib import Path

import torch
from gpu import CUDA, DEVICE, timed
from gpu_model import LLAMA_3_8B, SMALL, DecodeBatch, make_program

from sol.ops import KVCache, Program, run
from sol.ops.gpu.ops import GpuOps

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def milliseconds(program: Program, ops: GpuOps, made: DecodeBatch, context: int) -> float:
    # As in a step launched op by op, whose grids follow the batch and not the model's length.
    batch, cache = replace(made.batch, max_seq_len=context), KVCache(made.cache)
    return timed(lambda: run(program, ops, batch, cache))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--most", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--small", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    shape = SMALL if args.small or not CUDA else LLAMA_3_8B
    torch.manual_seed(0)
    program, ops = make_program(shape, DEVICE), GpuOps(DEVICE)
    rows = []
    print("ms; requests down, tokens of each across")
    print("      ", *(f"{tokens:>7}" for tokens in TOKENS))
    for requests in REQUESTS:
        line = []
        for tokens in TOKENS:
            if requests * tokens > args.most:
                continue
            ms = milliseconds(program, ops, DecodeBatch(shape, requests, args.context, tokens, DEVICE), args.context)
            row = {"requests": requests, "tokens_per_request": tokens, "context": args.context}
            rows.append(row | {"seconds": round(ms / 1e3, 7)})
            line.append(f"{ms:7.3f}")
        print(f"{requests:6}", *line, flush=True)
    if args.json is not None:
        result = {
            "benchmark": "gpu_verify",
            "card": torch.cuda.get_device_name() if CUDA else "none",
            "versions": {"torch": torch.__version__, "triton": __import__("triton").__version__},
            "date": datetime.date.today().isoformat(),
            "model": "Llama-3-8B's shape, bfloat16, random weights",
            "rows": rows,
        }
        args.json.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
