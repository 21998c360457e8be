"""A model in this process, for the commands that talk to it themselves: text in, text out, as it comes."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from sol.assemble import build_core
from sol.config import EngineConfig
from sol.engine.client import InProcessClient
from sol.engine.types import EngineRequest, FinishReason
from sol.errors import RequestError
from sol.models.source import resolve
from sol.sampling_params import SamplingParams
from sol.text.chat_template import ChatTemplate, load_chat_template
from sol.text.detokenizer import Detokenizer
from sol.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one of the texts under way."""

    index: int
    """Which prompt."""
    text: str
    num_tokens: int
    finish_reason: FinishReason | None


class Interrupt:
    """Whether Ctrl-C was pressed. While one is watched it interrupts no step half-way: generation ends after it."""

    def __init__(self) -> None:
        self.pressed = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        def note(_signal: int, _frame: FrameType | None) -> None:
            self.pressed = True

        self.pressed = False
        previous = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


class LocalModel:
    """Raises whatever `resolve` and `build_core` raise: a model or an option that cannot work."""

    def __init__(self, config: EngineConfig) -> None:
        files = resolve(config.model, load_format=config.load_format)
        self.tokenizer = Tokenizer.from_files(files)
        self._chat_template = load_chat_template(files)
        core = build_core(config, progress=True)
        self.info = core.info
        self._client = InProcessClient(core)
        self._seed = config.seed
        self._numbers = itertools.count()

    def require_chat_template(self) -> ChatTemplate:
        """Raises `RequestError` for a model that has none."""
        if self._chat_template is None:
            raise RequestError(
                f"{self.info.model} has no chat template: use `sol generate`, or an instruction-tuned model",
                param="messages",
            )
        return self._chat_template

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins."""
        return self.tokenizer.encode(self.require_chat_template().render(messages), add_special_tokens=False)

    def stream(self, prompts: Sequence[list[int]], params: SamplingParams, interrupt: Interrupt) -> Iterator[Piece]:
        """Generate for all prompts at once. After Ctrl-C, what is under way ends with finish_reason "abort"."""
        indices: dict[str, int] = {}
        detokenizers: list[Detokenizer] = []
        requests = []
        for index, prompt in enumerate(prompts):
            number = next(self._numbers)
            request = EngineRequest(
                request_id=f"local-{number}",
                prompt_token_ids=prompt,
                params=params,
                seed=self._seed + number,
                eos_token_ids=list(self.tokenizer.eos_token_ids),
            )
            indices[request.request_id] = index
            detokenizers.append(Detokenizer(self.tokenizer, params, prompt))
            requests.append(request)
        self._client.add(requests)
        with interrupt.watched():
            while indices:
                if interrupt.pressed:
                    self._client.abort(list(indices))
                for output in self._client.receive().outputs:
                    if output.request_id not in indices:
                        continue  # ended by a stop string; the engine heard of it a step later
                    if output.finish_reason == "error":
                        raise RequestError(output.error or "the engine refused the request")
                    index, finish_reason = indices[output.request_id], output.finish_reason
                    ended_by_token = finish_reason == "stop"
                    delta = detokenizers[index].push(output.new_token_ids, ended_by_token=ended_by_token)
                    text = delta.text
                    if delta.stop is not None:
                        finish_reason = "stop"
                        self._client.abort([output.request_id])
                    elif finish_reason is not None:
                        text += detokenizers[index].finish().text
                    if finish_reason is not None:
                        del indices[output.request_id]
                    yield Piece(index, text, delta.num_tokens, finish_reason)

    def close(self) -> None:
        self._client.close()
