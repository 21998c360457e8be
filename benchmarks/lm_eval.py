"""Whether lm-evaluation-harness scores a model through Sol's server as it does through transformers itself.

    python benchmarks/lm_eval.py MODEL_DIRECTORY [--tasks NAME …] [--include-path DIR] [--json FILE]

The same tasks run twice on the same checkpoint in float32: by the harness's own `hf` model, and by its
`local-completions` against `sol serve`, which it asks for the logprobs of prompts (`echo`). Reported are both scores,
how many samples have the same answer, and the largest difference of a log-likelihood; the bar is that no score differs.

The harness runs in an environment of its own under the model cache, made on first use. Tasks are those of
benchmarks/tools/lm_eval by default, which need no network; MODEL_DIRECTORY has to hold safetensors and a tokenizer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import Report
from rivals import HERE, LM_EVAL_VERSION, Tool, directory

TASKS = HERE / "tools" / "lm_eval"
READY_LINE = " is ready at "


@dataclass(frozen=True)
class Harness(Tool):
    """The harness with torch and transformers, beside the one that only speaks HTTP."""

    @property
    def root(self) -> Path:
        return directory() / f"lm-eval-hf-{self.pinned}"


HARNESS = Harness(
    "lm-evaluation-harness", "lm-eval", LM_EVAL_VERSION, torch=True, extras="[api]",
    beside=("transformers", "accelerate", "peft"),
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    scores: dict[str, dict[str, float]]
    """By task and metric."""
    likelihoods: dict[str, list[float]]
    """By task: of every continuation, in order."""
    answers: dict[str, list[int]]
    """By task: of every sample, which continuation is the likeliest."""


def evaluate(model: str, options: str, tasks: list[str], include: Path) -> Run:
    with tempfile.TemporaryDirectory() as out:
        command = [
            str(HARNESS.program("lm_eval")), "--model", model, "--model_args", options, "--include_path", ".",
            "--tasks", ",".join(tasks), "--device", "cpu", "--batch_size", "1", "--log_samples", "--output_path", out,
        ]  # fmt: skip
        subprocess.run(command, cwd=include, check=True, stdout=sys.stderr)
        (results,) = Path(out).rglob("results_*.json")
        scores = {
            task: {
                name: value
                for name, value in json.loads(results.read_text())["results"][task].items()
                if isinstance(value, float) and "stderr" not in name
            }
            for task in tasks
        }
        samples = {task: _samples(next(Path(out).rglob(f"samples_{task}_*.jsonl"))) for task in tasks}
    return Run(
        scores,
        {task: [value for sample in samples[task] for value in sample] for task in tasks},
        {task: [max(range(len(sample)), key=sample.__getitem__) for sample in samples[task]] for task in tasks},
    )


def _samples(path: Path) -> list[list[float]]:
    """The log-likelihoods of each sample's continuations."""
    samples = sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: int(sample["doc_id"]))
    return [[float(response[0][0]) for response in sample["resps"]] for sample in samples]


def through_server(model: Path, tasks: list[str], include: Path) -> Run:
    command = [
        sys.executable, "-m", "sol", "serve", str(model), "--port", "0", "--dtype", "float32",
        "--served-model-name", "model",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = next((line for line in server.stdout if READY_LINE in line), None)
            if line is None:
                raise SystemExit("the server did not start")
            url = line.partition(READY_LINE)[2].split()[0]
            options = (
                f"model=model,base_url={url}/v1/completions,num_concurrent=1,tokenizer_backend=huggingface,"
                f"tokenizer={model}"
            )
            return evaluate("local-completions", options, tasks, include)
        finally:
            server.terminate()
            server.communicate(timeout=60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tasks", nargs="+", default=["sol_capitals_scored"])
    parser.add_argument("--include-path", type=Path, default=TASKS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON object here too")
    args = parser.parse_args()
    HARNESS.prepare()
    model, include = args.model.resolve(), args.include_path.resolve()
    reference = evaluate("hf", f"pretrained={model},dtype=float32", args.tasks, include)
    ours = through_server(model, args.tasks, include)
    report = Report("lm_eval", quick=False, versions={HARNESS.package: HARNESS.pinned})
    for task in args.tasks:
        pairs = list(zip(reference.likelihoods[task], ours.likelihoods[task], strict=True))
        answers = list(zip(reference.answers[task], ours.answers[task], strict=True))
        num_same = sum(one == other for one, other in answers)
        for name, value in reference.scores[task].items():
            report.row(
                task=task, metric=name, hf=value, sol=ours.scores[task][name], samples=len(answers),
                same_answers=num_same,
                largest_difference=max(abs(one - other) for one, other in pairs),
            )  # fmt: skip
            report.at_most(f"{task} {name}: difference", abs(value - ours.scores[task][name]), 0.0)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
