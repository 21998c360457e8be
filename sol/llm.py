"""Offline inference: vLLM's `LLM`, on Sol's engine in this process."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from sol.config import DEFAULT_MODEL, EngineConfig, Quantization, Speculation
from sol.engine.types import FinishReason, SpeculationParams, SpeculationUsage, TokenLogprobs
from sol.errors import ConfigError, RequestError
from sol.grammar import Grammar
from sol.interrupt import Interrupt
from sol.local import LocalEngine, Piece
from sol.progress import Progress
from sol.sampling_params import SamplingParams
from sol.text.messages import flatten_messages
from sol.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Mapping[str, Any]
"""A text, `{"prompt": text}` or `{"prompt_token_ids": [...]}`."""
Message: TypeAlias = Mapping[str, Any]
SpeculationWish: TypeAlias = SpeculationParams | Sequence[SpeculationParams | None] | None
"""Of all prompts, or of each; None: as the engine is configured."""


@dataclass(slots=True, kw_only=True)
class Logprob:
    logprob: float
    rank: int
    """1 for the likeliest token."""
    decoded_token: str | None
    """None without a tokenizer."""


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """When logprobs were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token, itself and the likeliest ones by id, when asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or the stop token id that ended the choice; None for an end token."""
    origins: list[str] | None = field(default=None, compare=False)
    """Of each token, with `SpeculationParams(include_origins=True)`: the drafter that proposed it, or "target"."""
    speculation: SpeculationUsage | None = field(default=None, compare=False)
    """What speculation did for this choice; None where the engine does not speculate. How fast an answer came is no
    part of it, so this does not count when choices are compared, nor do the origins."""


@dataclass(slots=True, kw_only=True)
class PromptOutput:
    """What became of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each token of the prompt, itself and the likeliest ones by id, when asked for; None for the first one."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV cache was found rather than computed."""


_UNBOUNDED: Final = 2**31 - 1


class LLM:
    """A model, loaded and ready.

    Options are `sol.config.EngineConfig`'s, under vLLM's names. `quantization` is None (as the checkpoint is), "int8"
    or "int4" (quantise a full-precision checkpoint as it is loaded), or what the checkpoint has to be quantised with.
    `speculation` is "auto" or "off"; `speculative_model`, `num_speculative_tokens` and `speculative_config` (vLLM's
    dictionary) say what drafts. None of them changes the text.
    One default differs from the server's: nobody watches a stream here, so `max_num_prefill_tokens` bounds nothing
    unless it is given, and prompts take as much of a step as there is.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        quantization: Quantization | None = None,
        speculation: Speculation = "auto",
        speculative_config: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        unknown = sorted(set(options) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            known = ", ".join(f for f in EngineConfig.__dataclass_fields__)
            raise ConfigError(f"LLM has no option {unknown[0]}; it knows {known}", param=unknown[0])
        if options.get("max_num_prefill_tokens") is None:
            options["max_num_prefill_tokens"] = _UNBOUNDED
        config = EngineConfig(
            model=model,
            quantization=quantization,
            speculation=speculation,
            speculative_config=speculative_config,
            **options,
        )
        self._engine = LocalEngine(config)
        self._num_requests = 0

    def get_tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def check_grammar(self, grammar: Grammar) -> None:
        """Compile what `SamplingParams.grammar` is to be, which is then kept. Raises `RequestError` naming the feature
        that is not supported."""
        self._engine.check_grammar(grammar)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: SpeculationWish = None,
        use_tqdm: bool = True,
    ) -> list[PromptOutput]:
        """Complete prompts; one result each, in order. `use_tqdm` (vLLM's name) shows progress on stderr.

        `sampling_params` is one for all prompts or one each, and so is `speculation`, what they want of it. Raises
        `RequestError` before anything is generated if a prompt or parameter cannot be honoured.
        """
        wanted: Sequence[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else prompts
        if not isinstance(wanted, Sequence):
            raise RequestError(f"prompts must be a prompt or a list of prompts, not {wanted!r}", param="prompts")
        texts, token_ids = [], []
        for prompt in wanted:
            text, ids = self._read_prompt(prompt)
            texts.append(text)
            token_ids.append(ids)
        return self._run(texts, token_ids, sampling_params, speculation, show=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: SpeculationWish = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PromptOutput]:
        """Answer one conversation, or a list of them, through the model's chat template. Otherwise as `generate`."""
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        template = self._engine.chat_template
        texts: list[str | None] = [
            template.render(
                flatten_messages(conversation),
                add_generation_prompt=add_generation_prompt,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        encode = self._engine.tokenizer.encode
        token_ids = [encode(text, add_special_tokens=False) for text in texts if text is not None]
        return self._run(texts, token_ids, sampling_params, speculation, show=use_tqdm)

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            unknown = sorted(map(str, set(prompt) - {"prompt", "prompt_token_ids"}))
            if unknown:
                raise RequestError(f"a prompt has prompt or prompt_token_ids, not {unknown[0]}", param="prompts")
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"])
            prompt = prompt.get("prompt", None)
        if not isinstance(prompt, str):
            raise RequestError(
                'a prompt must be a text, {"prompt": text} or {"prompt_token_ids": [...]}, not '
                f"{type(prompt).__name__}",
                param="prompts",
            )
        return prompt, self._engine.tokenizer.encode(prompt)

    def _run(
        self,
        texts: Sequence[str | None],
        token_ids: Sequence[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        speculation: SpeculationWish,
        *,
        show: bool,
    ) -> list[PromptOutput]:
        params = self._params_of_each(sampling_params, len(texts))
        wishes = _wish_of_each(speculation, len(texts))
        results = []
        for text, ids, wanted in zip(texts, token_ids, params, strict=True):
            choices = [_empty_choice(index, wanted) for index in range(wanted.n)]
            results.append(
                PromptOutput(request_id=str(self._num_requests), prompt=text, prompt_token_ids=ids, outputs=choices)
            )
            self._num_requests += 1
        total = sum(wanted.n for wanted in params)
        # An engine that is broken off within a step is lost, so Ctrl-C waits for the step's end.
        interrupt = Interrupt()
        with (
            interrupt.watched() if interrupt.can_be_watched else nullcontext(),
            closing(self._engine.stream(token_ids, params, speculation=wishes, cancelled=interrupt.pressed)) as pieces,
            Progress(total, "Generating", show=show) as bar,
        ):
            for piece in pieces:
                result = results[piece.prompt_index]
                self._add(result.outputs[piece.choice_index], piece)
                if piece.prompt_logprobs is not None and piece.choice_index == 0:
                    entries = zip(result.prompt_token_ids[1:], piece.prompt_logprobs, strict=True)
                    result.prompt_logprobs = [None, *(self._entry(token_id, entry) for token_id, entry in entries)]
                if piece.finish_reason is not None:
                    # Later choices find the whole prompt; what the first one found is the request's.
                    if piece.choice_index == 0:
                        result.num_cached_tokens = piece.num_cached_tokens
                    bar.advance(1)
        if interrupt.pressed():
            raise KeyboardInterrupt
        return results

    def _params_of_each(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        if not isinstance(sampling_params, Sequence) or not all(isinstance(p, SamplingParams) for p in sampling_params):
            raise RequestError(
                f"sampling_params must be a SamplingParams, or a list with one for each prompt, not "
                f"{reprlib.repr(sampling_params)}",
                param="sampling_params",
            )
        if len(sampling_params) != count:
            raise RequestError(
                f"there are {count} prompts but {len(sampling_params)} sampling_params: pass one, or one for each",
                param="sampling_params",
            )
        return sampling_params

    def _add(self, output: CompletionOutput, piece: Piece) -> None:
        output.text += piece.text
        output.token_ids += piece.token_ids
        output.finish_reason, output.stop_reason = piece.finish_reason, piece.stop_reason
        output.speculation = piece.speculation
        if piece.origins is not None:
            output.origins = (output.origins or []) + piece.origins
        if output.logprobs is None or piece.logprobs is None:
            return
        for token_id, entry in zip(piece.token_ids, piece.logprobs, strict=True):
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + entry.logprob
            output.logprobs.append(self._entry(token_id, entry))

    def _entry(self, token_id: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        found = {token_id: self._logprob(token_id, entry.logprob, entry.rank)}
        for rank, (other, logprob) in enumerate(entry.top, start=1):
            found.setdefault(other, self._logprob(other, logprob, rank))
        return found

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        text = None
        if self._engine.has_tokenizer:
            text = self._engine.tokenizer.decode([token_id], skip_special_tokens=False)
        return Logprob(logprob=logprob, rank=rank, decoded_token=text)


def _token_ids(values: Any) -> list[int]:
    """Integers of any type (Python's, numpy's, torch's) as a list of Python's."""
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise RequestError(
            f"prompt_token_ids must be a list of integers, not {reprlib.repr(values)}", param="prompts"
        ) from None


def _wish_of_each(wish: SpeculationWish, count: int) -> Sequence[SpeculationParams | None]:
    if wish is None or isinstance(wish, SpeculationParams):
        return [wish] * count
    if not isinstance(wish, Sequence) or not all(w is None or isinstance(w, SpeculationParams) for w in wish):
        raise RequestError(
            f"speculation must be a SpeculationParams, or a list with one (or None) for each prompt, not "
            f"{reprlib.repr(wish)}",
            param="speculation",
        )
    if len(wish) != count:
        raise RequestError(
            f"there are {count} prompts but {len(wish)} wishes of speculation: pass one, or one for each",
            param="speculation",
        )
    return wish


def _empty_choice(index: int, params: SamplingParams) -> CompletionOutput:
    if params.logprobs is None:
        return CompletionOutput(index=index)
    return CompletionOutput(index=index, cumulative_logprob=0.0, logprobs=[])
