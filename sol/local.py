"""An engine in this process with its tokenizer: token ids or text in, pieces of text out as they come.

`sol.LLM` and the commands that talk to a model themselves are built on it. Not thread-safe.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from sol.assemble import build_core
from sol.config import EngineConfig
from sol.engine.client import InProcessClient
from sol.engine.types import (
    TARGET,
    EngineRequest,
    FinishReason,
    RequestOutput,
    SpeculationParams,
    SpeculationUsage,
    TokenLogprobs,
)
from sol.errors import ConfigError, ContextLengthError, RequestError, SolError
from sol.grammar import GRAMMAR_FAILED, Grammar
from sol.models.source import resolve_configured
from sol.sampling_params import SamplingParams
from sol.seeds import SeedSource
from sol.speculation.request import check_speculation
from sol.speculation.usage import advance
from sol.text.chat_template import ChatTemplate, load_chat_template
from sol.text.detokenizer import Detokenizer
from sol.text.tokenizer import Tokenizer, end_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one step added to one choice."""

    prompt_index: int
    choice_index: int
    text: str
    """May be empty: whole characters only, and nothing that could be the beginning of a stop string."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    """One for each of `token_ids`, when asked for."""
    prompt_logprobs: list[TokenLogprobs] | None
    """One for each token of the prompt but the first, when asked for; comes with the first tokens."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    """The stop string or the stop token id that ended the choice."""
    num_cached_tokens: int
    origins: list[str] | None
    """Of each of `token_ids`, when asked for: the drafter that proposed it, or "target"."""
    speculation: SpeculationUsage | None
    """Of the choice, so far; None where the engine does not speculate."""


@dataclass(slots=True)
class _Choice:
    prompt_index: int
    request: EngineRequest
    detokenizer: Detokenizer | None
    speculation: SpeculationUsage | None


class LocalEngine:
    """Raises whatever `resolve` and `build_core` raise: a model or an option that cannot work."""

    def __init__(self, config: EngineConfig, *, progress: bool = True) -> None:
        files = resolve_configured(config, progress=progress)
        self._tokenizer = None if config.skip_tokenizer_init else Tokenizer.from_files(files)
        self._chat_template = None if config.skip_tokenizer_init else load_chat_template(files)
        self._eos_token_ids = list(end_token_ids(files, self._tokenizer))
        core = build_core(config, progress=progress)
        self.info = core.info
        self._client = InProcessClient(core)
        self._compile_grammar = core.check_grammar
        self._seeds = SeedSource(config.seed)
        self._numbers = itertools.count()

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises `ConfigError` if the engine was made without one."""
        if self._tokenizer is None:
            raise ConfigError(
                "this needs the tokenizer, but skip_tokenizer_init is set: pass prompt_token_ids and detokenize=False",
                param="skip_tokenizer_init",
            )
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises `RequestError` for a model that has none."""
        if self._chat_template is None:
            raise RequestError(
                f"{self.info.model} has no chat template: use plain prompts, or an instruction-tuned model",
                param="messages",
            )
        return self._chat_template

    def stream(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        speculation: Sequence[SpeculationParams | None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generator[Piece, None, None]:
        """Generate `params[i].n` choices of `prompts[i]`, all at once; pieces come in the order they are made.

        `speculation[i]` is what prompt i wants of it; None, for one or for all: as the engine is configured.

        Once `cancelled()` is true, what is under way ends with finish_reason "abort" after the step that runs.
        Closing the iterator ends everything. Raises `RequestError` for a prompt or parameters that cannot be
        answered, before anything is generated; `EngineDeadError` if the engine failed, now or before; `SolError` if
        the model gave no finite logits for one of them.
        """
        choices = self._make_choices(prompts, params, speculation or [None] * len(prompts))
        try:
            self._client.add([choice.request for choice in choices.values()])
            while choices:
                if cancelled():
                    self._client.abort(list(choices))
                for output in self._client.receive().outputs:
                    choice = choices.get(output.request_id)
                    if choice is None:
                        continue  # ended by a stop string; the engine heard of it a step later
                    piece = self._take(choice, output)
                    if piece.finish_reason is not None:
                        del choices[output.request_id]
                    yield piece
        finally:
            self._client.abort(list(choices))

    def check_grammar(self, grammar: Grammar) -> None:
        """Raise `RequestError` for one that cannot be compiled."""
        try:
            self._compile_grammar(grammar)
        except RequestError as error:
            raise RequestError(f"grammar: {error.message}", param="grammar") from None

    def close(self) -> None:
        self._client.close()

    def _make_choices(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        speculation: Sequence[SpeculationParams | None],
    ) -> dict[str, _Choice]:
        choices = {}
        for prompt_index, (prompt, wanted, wish) in enumerate(zip(prompts, params, speculation, strict=True)):
            self._check(prompt, wanted)
            if wish is not None:
                check_speculation(wish, self.info.drafters)
            seed = self._seeds.next() if wanted.seed is None else wanted.seed
            for choice_index in range(wanted.n):
                request = EngineRequest(
                    request_id=f"local-{next(self._numbers)}",
                    prompt_token_ids=prompt,
                    params=wanted,
                    seed=seed,
                    choice_index=choice_index,
                    eos_token_ids=self._eos_token_ids,
                    speculation=wish,
                )
                detokenizer = Detokenizer(self.tokenizer, wanted, prompt) if wanted.detokenize else None
                usage = SpeculationUsage() if self.info.drafters else None
                choices[request.request_id] = _Choice(prompt_index, request, detokenizer, usage)
        return choices

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        limit = self.info.max_model_len
        if not prompt:
            raise RequestError("a prompt must have at least one token", param="prompt")
        if len(prompt) >= limit:
            raise ContextLengthError(
                f"a prompt has {len(prompt)} tokens, but prompt and output together may have {limit}: shorten it, or "
                "raise max_model_len",
                param="prompt",
            )
        if min(prompt) < 0 or max(prompt) >= self.info.vocab_size:
            raise RequestError(
                f"a prompt has token ids outside of the vocabulary of {self.info.vocab_size} tokens", param="prompt"
            )
        params.check_vocabulary(self.info.vocab_size)
        if params.grammar is not None:
            self.check_grammar(params.grammar)

    def _take(self, choice: _Choice, output: RequestOutput) -> Piece:
        if output.finish_reason == "error":
            self._client.check_alive()
            if output.error is not None and output.error.startswith(GRAMMAR_FAILED):
                raise RequestError(output.error, param="grammar")
            raise SolError(output.error or "the engine refused the request")
        text, finish_reason = "", output.finish_reason
        token_ids = output.new_token_ids
        stop_reason: str | int | None = output.stop_token_id
        if choice.detokenizer is not None:
            delta = choice.detokenizer.push(token_ids, ended_by_token=finish_reason == "stop")
            text, token_ids = delta.text, token_ids[: delta.num_tokens]
            if delta.stop is not None:
                finish_reason, stop_reason = "stop", delta.stop
                self._client.abort([output.request_id])
            elif finish_reason is not None:
                text += choice.detokenizer.finish().text
        choice.speculation, _ = advance(choice.speculation, output, len(token_ids))
        return Piece(
            prompt_index=choice.prompt_index,
            choice_index=choice.request.choice_index,
            text=text,
            token_ids=token_ids,
            logprobs=None if output.logprobs is None else output.logprobs[: len(token_ids)],
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=output.num_cached_tokens,
            origins=self._origins(choice, output, len(token_ids)),
            speculation=choice.speculation,
        )

    def _origins(self, choice: _Choice, output: RequestOutput, count: int) -> list[str] | None:
        wish = choice.request.speculation
        if wish is None or not wish.include_origins:
            return None
        # An engine that does not speculate names nobody: everything is the model's own.
        return ([TARGET] * count if output.origins is None else output.origins)[:count]
