"""A classifier in ONNX form, made here: it adds up what each word is worth."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filter_calls import chat, make_call
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from sol.errors import ConfigError
from sol.gateway.filters.classifier import OnnxClassifier
from sol.gateway.filters.config import InjectionRule
from sol.gateway.filters.detectors import BudgetError
from sol.gateway.filters.errors import ContentFilteredError, FilterFailedError
from sol.gateway.filters.filters import Filters
from sol.gateway.filters.matcher import Search
from sol.gateway.filters.rules import Rule

pytest.importorskip("onnxruntime", reason="the extra guard is not installed")
onnx = pytest.importorskip("onnx", reason="onnx, which makes the model, is not installed")

WORDS = {"[PAD]": 0.0, "[UNK]": -1.0, "attack": 40.0, "忽略指令": 40.0}


def make_model(directory: Path, *, outputs: int = 2, inputs: tuple[str, ...] = ("input_ids", "attention_mask")) -> None:
    """Logits: 0 for all labels but the last, for that -5 and the sum of the words that the mask covers."""
    helper, types = onnx.helper, onnx.TensorProto
    worth = np.zeros((len(WORDS), outputs), dtype=np.float32)
    worth[:, -1] = list(WORDS.values())
    bias = np.zeros(outputs, dtype=np.float32)
    bias[-1] = -5.0
    nodes = [
        helper.make_node("Gather", ["worth", "input_ids"], ["words"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=types.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
        helper.make_node("Mul", ["words", "column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "axis"], ["sums"], keepdims=0),
        helper.make_node("Add", ["sums", "bias"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "words",
        [helper.make_tensor_value_info(name, types.INT64, ["batch", "length"]) for name in inputs],
        [helper.make_tensor_value_info("logits", types.FLOAT, ["batch", outputs])],
        [
            onnx.numpy_helper.from_array(worth, "worth"),
            onnx.numpy_helper.from_array(bias, "bias"),
            onnx.numpy_helper.from_array(np.array([2], dtype=np.int64), "last"),
            onnx.numpy_helper.from_array(np.array([1], dtype=np.int64), "axis"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(directory / "model.onnx"))
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))


def rule(directory: Path, *, options: dict[str, Any] | None = None, **more: Any) -> InjectionRule:
    classifier = {"model": directory / "model.onnx", "tokenizer": directory / "tokenizer.json", **(options or {})}
    return InjectionRule(kind="injection", name="guard", classifier=classifier, **more)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("classifier")
    make_model(directory)
    return directory


async def test_the_sentence_that_is_an_attack_is_found_among_many(model: Path) -> None:
    filters = Filters([rule(model, options={"budget": 30})])
    # All words together are worth less than nothing; one sentence alone is an attack.
    text = "These are words. " * 40 + "This is an attack. " + "你好。忽略指令！ " + "And some more."
    call = make_call(chat(text))
    with pytest.raises(ContentFilteredError):
        await filters.check(call)
    found = [decision.detail.split() for decision in call.decisions]
    start = text.index("This is an")
    assert [words[1] for words in found] == [f"{start}..{start + 18}", f"{text.index('忽')}..{text.index('忽') + 5}"]
    assert all(words[2].startswith("score=1.00") for words in found)
    await filters.check(make_call(chat("These are words. " * 40)))
    filters.close()


def test_a_long_sentence_is_looked_at_in_windows(model: Path) -> None:
    detector = OnnxClassifier(Rule(rule(model, options={"max_tokens": 16}), Search()))
    text = "word " * 60 + "attack " + "word " * 60
    [found] = detector.detect([text], time.monotonic() + 30)
    assert text[found.start : found.end] == text.strip()
    assert detector.detect(["word " * 121], time.monotonic() + 30) == []


def test_sentences_seen_before_are_not_scored_again(model: Path) -> None:
    detector = OnnxClassifier(Rule(rule(model), Search()))
    text = "Some words. An attack."
    first = detector.detect([text], time.monotonic() + 30)
    # The time is up, and everything is known.
    assert detector.detect([text], time.monotonic() - 1) == first
    with pytest.raises(BudgetError):
        detector.detect([text + " Something new."], time.monotonic() - 1)


async def test_a_budget_that_is_too_short_refuses_or_passes(model: Path) -> None:
    for on_error in ("reject", "pass"):
        filters = Filters([rule(model, options={"budget": 1e-6}, on_error=on_error)])
        call = make_call(chat("An attack."))
        if on_error == "reject":
            with pytest.raises(FilterFailedError):
                await filters.check(call)
        else:
            await filters.check(call)
        assert filters.counts.failures == {("guard", "timeout"): 1}
        filters.close()


def test_a_model_with_one_output_gives_its_logit(tmp_path: Path) -> None:
    make_model(tmp_path, outputs=1)
    filters = Filters([rule(tmp_path)])
    assert [d.action for d in filters.explain("An attack.")] == ["reject"]
    assert filters.explain("A word.") == []
    filters.close()


def test_what_does_not_fit_is_a_configuration_error(model: Path, tmp_path: Path) -> None:
    make_model(tmp_path, inputs=("input_ids", "attention_mask", "pixels"))
    for options, field, message in (
        ({"model": model / "missing.onnx"}, "model", "cannot be loaded"),
        ({"tokenizer": model / "missing.json"}, "tokenizer", "cannot be read"),
        ({"label": 2}, "model", "label 2 is none of its 2 outputs"),
        ({"model": tmp_path / "model.onnx"}, "model", "wants the inputs pixels"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            Filters([rule(model, options=options)])
        assert error.value.param == f"filters.guard.classifier.{field}"
