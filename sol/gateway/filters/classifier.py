"""Prompt injection by a sequence classifier in ONNX form: any model that takes token ids and gives logits."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np

from sol.errors import ConfigError
from sol.gateway.filters.config import ClassifierOptions, InjectionRule
from sol.gateway.filters.detectors import BudgetError, Detection
from sol.gateway.filters.rules import Rule
from sol.gateway.filters.sentences import sentences

_REMEMBERED: Final = 8192
"""Sentences whose scores are kept, by hash: each turn of a conversation sends all turns before it again."""


class OnnxClassifier:
    """A `Detector`. Scores each sentence of a text; of a long sentence, overlapping windows.

    Raises `ConfigError` if onnxruntime is missing, or model and tokenizer cannot be read or do not fit each other.
    """

    def __init__(self, rule: Rule) -> None:
        assert isinstance(rule.config, InjectionRule)
        assert rule.config.classifier is not None
        self.rule = rule
        self._options = options = rule.config.classifier
        self._threshold = rule.config.threshold
        self.budget = options.budget
        self._place = f"filters.{rule.config.name}.classifier"
        self._session = self._load_model(options)
        self._tokenizer = self._load_tokenizer(options.tokenizer)
        self._inputs = {item.name for item in self._session.get_inputs()}
        self._scores: OrderedDict[bytes, float] = OrderedDict()
        if unknown := self._inputs - {"input_ids", "attention_mask", "token_type_ids"}:
            raise self._error("model", f"wants the inputs {', '.join(sorted(unknown))}, which nobody here has")
        try:
            self._score_batch([self._tokenizer.encode("Is this one sentence?")])
        except Exception as error:
            raise self._error("model", f"cannot score a sentence: {error}") from error

    def detect(self, texts: Sequence[str], deadline: float) -> list[Detection]:
        found = []
        waiting: list[tuple[int, int, int, bytes, str]] = []
        for number, text in enumerate(texts):
            for start, end in sentences(text):
                sentence = text[start:end]
                key = blake2b(sentence.encode(errors="replace"), digest_size=16).digest()
                score = self._scores.get(key)
                if score is None:
                    waiting.append((number, start, end, key, sentence))
                elif score >= self._threshold:
                    found.append(Detection(number, start, end, f"score={score:.2f}"))
        for begin in range(0, len(waiting), self._options.batch):
            if time.monotonic() >= deadline:
                raise BudgetError
            batch = waiting[begin : begin + self._options.batch]
            scores = self._score([sentence for *_, sentence in batch], deadline)
            for (number, start, end, key, _), score in zip(batch, scores, strict=True):
                self._remember(key, score)
                if score >= self._threshold:
                    found.append(Detection(number, start, end, f"score={score:.2f}"))
        return found

    def _score(self, texts: list[str], deadline: float) -> list[float]:
        windows: list[Any] = []
        owners: list[int] = []
        for owner, encoding in enumerate(self._tokenizer.encode_batch(texts)):
            for window in (encoding, *encoding.overflowing):
                windows.append(window)
                owners.append(owner)
        scores = [0.0] * len(texts)
        for begin in range(0, len(windows), self._options.batch):
            if begin and time.monotonic() >= deadline:
                raise BudgetError
            part = slice(begin, begin + self._options.batch)
            for owner, score in zip(owners[part], self._score_batch(windows[part]), strict=True):
                scores[owner] = max(scores[owner], score)
        return scores

    def _score_batch(self, encodings: list[Any]) -> Iterator[float]:
        length = max(1, *(len(encoding.ids) for encoding in encodings))
        arrays = {name: np.zeros((len(encodings), length), dtype=np.int64) for name in self._inputs}
        for row, encoding in enumerate(encodings):
            for name, values in (
                ("input_ids", encoding.ids),
                ("attention_mask", encoding.attention_mask),
                ("token_type_ids", encoding.type_ids),
            ):
                if name in arrays:
                    arrays[name][row, : len(values)] = values
        logits = np.asarray(self._session.run(None, arrays)[0], dtype=np.float64)
        logits = logits.reshape(len(encodings), -1)
        if logits.shape[1] == 1:
            return iter((1 / (1 + np.exp(-logits[:, 0]))).tolist())
        if self._options.label >= logits.shape[1]:
            raise ValueError(f"label {self._options.label} is none of its {logits.shape[1]} outputs")
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        return iter((odds[:, self._options.label] / odds.sum(axis=1)).tolist())

    def _remember(self, key: bytes, score: float) -> None:
        self._scores[key] = score
        if len(self._scores) > _REMEMBERED:
            self._scores.popitem(last=False)

    def _load_model(self, options: ClassifierOptions) -> Any:
        try:
            import onnxruntime
        except ImportError:
            raise self._error("model", "needs onnxruntime: pip install 'sol-inference[guard]'") from None
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = options.threads
        settings.inter_op_num_threads = 1
        settings.log_severity_level = 3
        # Threads that spin between two sentences would take the core from the gateway.
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            return onnxruntime.InferenceSession(str(options.model), settings, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise self._error("model", f"{options.model} cannot be loaded: {error}") from None

    def _load_tokenizer(self, path: Path) -> Any:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(path))
            tokenizer.no_padding()
            tokenizer.enable_truncation(self._options.max_tokens, stride=self._options.max_tokens // 4)
        except Exception as error:
            raise self._error("tokenizer", f"{path} cannot be read: {error}") from None
        return tokenizer

    def _error(self, field: str, message: str) -> ConfigError:
        return ConfigError(f"{self._place}.{field}: {message}", param=f"{self._place}.{field}")
