"""`sol generate` and `sol chat` on a real engine; the chat as a person sees it, in a terminal."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pseudo_terminal import terminal

from sol import LLM, SamplingParams
from sol.cli import main
from sol.cli.chat import _speculated
from sol.engine.types import DraftCounts, SpeculationUsage
from sol.models.source import ModelFiles

PROMPTS = ["The capital of France is", "Once upon a time", "def main():"]


@pytest.fixture(scope="module")
def expected(talking_llama: Path) -> list[str]:
    """What `sol.LLM` makes of the prompts."""
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    return [output.outputs[0].text for output in LLM(str(talking_llama)).generate(PROMPTS, params, use_tqdm=False)]


def generate(model: Path | str, *words: str) -> int:
    return main(["generate", *words, "--model", str(model), "--temperature", "0", "--ignore-eos"])


def test_prompts_are_answered_in_their_order(
    talking_llama: Path, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(talking_llama, *PROMPTS, "--max-tokens", "9") == 0
    assert capsys.readouterr().out == "".join(text + "\n" for text in expected)


def test_a_prompt_may_come_from_stdin(
    talking_llama: Path, expected: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPTS[1]))
    assert generate(talking_llama, PROMPTS[0], "-", "--max-tokens", "9") == 0
    assert capsys.readouterr().out == f"{expected[0]}\n{expected[1]}\n"


def test_a_stop_string_ends_the_text(
    talking_llama: Path, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    stop = expected[0][4:7]
    assert generate(talking_llama, PROMPTS[0], "--max-tokens", "9", "--stop", stop) == 0
    assert capsys.readouterr().out == expected[0][: expected[0].index(stop)] + "\n"


def test_a_prompt_that_is_too_long_is_one_clear_line(talking_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(talking_llama, "word " * 600) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("sol: error: a prompt has 60")
    assert "512" in error


def test_ctrl_c_ends_the_generation_and_not_the_text(talking_llama: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "sol", "generate", "Go on", "--model", str(talking_llama), "--ignore-eos",
         "--max-tokens", "500"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert (first + rest).endswith(b"\n")


def test_the_default_model_makes_sense(smollm2: ModelFiles, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--max-tokens", "3", "--max-model-len", "64", "--max-num-batched-tokens", "16", "--max-num-seqs", "1")
    assert generate(smollm2.name, "The capital of France is", *words) == 0
    assert capsys.readouterr().out.startswith(" Paris")


def test_a_conversation(talking_llama: Path) -> None:
    words = ("chat", str(talking_llama), "--temperature", "0", "--ignore-eos", "--max-tokens", "8", "--system", "Hi.")
    with terminal(*words) as chat:
        chat.wait_for("Ctrl-C stops an answer[^>]*\n> ")
        chat.type("Hello\n")
        first = chat.wait_for("8 tokens, the first after .*; the length limit ended it\r\n> ")
        chat.type("Hello\n")
        second = chat.wait_for("8 tokens, [^>]*\n> ")
        assert answer(second) != answer(first), "the second answer knows the first"
        chat.type("/reset\n")
        chat.wait_for("The conversation is forgotten.\r\n> ")
        chat.type("Hello\n")
        assert answer(chat.wait_for("8 tokens, [^>]*\n> ")) == answer(first)
        chat.type("/what is this\n")
        chat.wait_for("/what is no command: [^>]*\n> ")
        chat.type("\n")
        chat.wait_for("> ")
        chat.type("word " * 600 + "\n")
        chat.wait_for("a prompt has 6[^>]*/reset begins a new conversation[^>]*\n> ")
        chat.interrupt_until("> ")
        chat.type("\x04")
        assert chat.process.wait(60) == 0


def test_what_speculation_did_is_under_the_answer() -> None:
    counts = {"suffix": DraftCounts(num_drafts=3, num_draft_tokens=9, num_accepted_tokens=6), "ngram": DraftCounts()}
    usage = SpeculationUsage(num_steps=5, drafters=counts, speedup=1.625)
    assert _speculated(usage) == ", mean acceptance length 3.00, about 1.62× plain decoding"
    usage.speedup = None
    assert _speculated(usage) == ", mean acceptance length 3.00"
    assert _speculated(SpeculationUsage(num_steps=5, speedup=1.0)) == "", "nothing was drafted"
    assert _speculated(None) == ""


def answer(screen: str) -> str:
    """What is between the echoed question and the statistics."""
    return screen.split("\n", 1)[1].rsplit("8 tokens, the first", 1)[0]


def test_ctrl_c_stops_the_answer_only(talking_llama: Path) -> None:
    with terminal("chat", str(talking_llama), "--temperature", "0", "--ignore-eos") as chat:
        chat.wait_for("> ")
        chat.type("Hello\n")
        chat.wait_for("Hello\r\n.")
        chat.type("\x03")
        chat.wait_for("tokens, .*; stopped\r\n> ")
        chat.type("/exit\n")
        assert chat.process.wait(60) == 0


def test_a_conversation_through_pipes(talking_llama: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sol", "chat", str(talking_llama), "--max-tokens", "4"],
        input="Hello\nAnd now?\n", capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0
    assert ">" not in done.stdout.splitlines()
    assert done.stderr.count(" tokens, the first after") == 2


def test_a_model_without_a_chat_template_is_refused_at_once(
    talking_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in talking_llama.iterdir():
        if file.name != "tokenizer_config.json":
            (tmp_path / file.name).symlink_to(file)
    assert main(["chat", str(tmp_path)]) == 2
    assert "has no chat template" in capsys.readouterr().err
