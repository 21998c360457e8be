"""vLLM as a child of benchmarks/cpu.py, run by its own interpreter: generates on demand and says how long it took.

Reads a JSON object a line, {"streams", "prompt", "tokens"}, and answers with {"seconds"}; first it writes
{"ready": seconds}. Imports nothing of ours.
"""

import json
import os
import sys
import time


def main() -> None:
    model, max_model_len = sys.argv[1], int(sys.argv[2])
    # Its progress goes to stdout; the answers get the real one.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    begin = time.perf_counter()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model, dtype="float32", max_model_len=max_model_len, enforce_eager=True, skip_tokenizer_init=True,
        enable_prefix_caching=False, max_num_seqs=64,
    )  # fmt: skip
    print(json.dumps({"ready": time.perf_counter() - begin}), file=answers, flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=wanted["tokens"], detokenize=False)
        prompts = [
            {"prompt_token_ids": [1000 + 64 * stream + i for i in range(wanted["prompt"])]}
            for stream in range(wanted["streams"])
        ]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert all(len(output.outputs[0].token_ids) == wanted["tokens"] for output in outputs)
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
