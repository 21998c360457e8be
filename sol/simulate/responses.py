"""The bytes of answers: OpenAI's two schemas, whole and in chunks, as `sol.server` has them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sol.engine.types import TARGET, DraftCounts, SpeculationUsage, TokenLogprobs
from sol.server.speculation import usage_fields
from sol.server.stream_usage import StreamUsage
from sol.simulate import vocabulary
from sol.simulate.engine import SimulatedRequest
from sol.simulate.language import Answer
from sol.version import __version__

DRAFTER = "simulated"
DONE = b"data: [DONE]\n\n"
SYSTEM_FINGERPRINT = f"sol-simulate-{__version__}"


@dataclass(slots=True, eq=False)
class Choice:
    """One choice: what it will say, and how far the engine is with it."""

    index: int
    prompt_index: int
    answer: Answer
    request: SimulatedRequest
    num_sent: int = 0
    """Tokens."""
    chars_sent: int = 0


class Schema:
    """Writes one response, of chat or completions. `echoed` is one text a choice, for completions."""

    def __init__(
        self,
        *,
        chat: bool,
        model: str,
        response_id: str,
        echoed: Sequence[str],
        usages: StreamUsage,
        with_segments: bool,
    ) -> None:
        self._with_segments = with_segments
        self._chat = chat
        self._echoed = echoed
        self._head = {
            "id": response_id,
            "object": ("chat.completion" if chat else "text_completion"),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }
        chunk = {**self._head, "object": "chat.completion.chunk"} if chat else self._head
        self._chunk_head = chunk
        self._before = f'data: {to_json(chunk)[:-1]},"choices":[{{"index":'
        self._usages = usages

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any] | None) -> bytes:
        return to_json({**self._head, "choices": [self._choice(choice) for choice in choices], "usage": usage}).encode()

    def opening(self, choices: Sequence[Choice]) -> list[bytes]:
        """The chunks before the first token: chat's roles, or what completions echo."""
        if self._chat:
            role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
            return [f"{self._before}{choice.index},{role}{self._opened(choice)}".encode() for choice in choices]
        rest = '"logprobs":null,"finish_reason":null,"stop_reason":null'
        return [
            f'{self._before}{choice.index},"text":{json.dumps(text)},{rest}{self._opened(choice)}'.encode()
            for choice, text in zip(choices, self._echoed, strict=True)
            if text
        ]

    def _opened(self, choice: Choice) -> str:
        """The end of the event of a choice that has no token yet."""
        return self._usages.close(choice.request.prompt_tokens, 0)

    def chunks(self, choice: Choice, num_tokens: int, num_accepted: int) -> list[bytes]:
        """The next `num_tokens` tokens of a choice, drafted ones first; the answer's last one closes it."""
        answer = choice.answer
        begin, end = choice.num_sent, choice.num_sent + num_tokens
        after = self._usages.close(choice.request.prompt_tokens, end)
        text = answer.text[choice.chars_sent : answer.ends[end - 1]]
        finished = end == len(answer.token_ids)
        logprobs = "null"
        if answer.logprobs is not None:
            logprobs = to_json(self._logprobs(answer, begin, end))
        extra = _segments(choice, num_tokens, num_accepted) if self._with_segments else ""
        if self._chat:
            chunks = []
            if text or answer.logprobs is not None or extra:
                chunks.append(
                    f'{self._before}{choice.index},"delta":{{"content":{json.dumps(text)}}},"logprobs":{logprobs},'
                    f'"finish_reason":null{extra}{after}'
                )
            if finished:
                chunks.append(
                    f'{self._before}{choice.index},"delta":{{}},"logprobs":null,"finish_reason":'
                    f'"{answer.finish_reason}","stop_reason":{to_json(answer.stop_reason)}{after}'
                )
        else:
            reasons = f'"finish_reason":null,"stop_reason":null{extra}'
            if finished:
                reasons = f'"finish_reason":"{answer.finish_reason}","stop_reason":{to_json(answer.stop_reason)}{extra}'
            chunks = [f'{self._before}{choice.index},"text":{json.dumps(text)},"logprobs":{logprobs},{reasons}{after}']
        choice.num_sent, choice.chars_sent = end, answer.ends[end - 1]
        return [chunk.encode() for chunk in chunks]

    def usage_chunk(self, usage: dict[str, Any] | None) -> bytes:
        return f"data: {to_json({**self._chunk_head, 'choices': [], 'usage': usage})}\n\n".encode()

    def _choice(self, choice: Choice) -> dict[str, Any]:
        answer = choice.answer
        logprobs = None if answer.logprobs is None else self._logprobs(answer, 0, len(answer.token_ids))
        ending = {"logprobs": logprobs, "finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
        if self._chat:
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            return {"index": choice.index, "message": message, **ending}
        return {"index": choice.index, "text": self._echoed[choice.index] + answer.text, **ending}

    def _logprobs(self, answer: Answer, begin: int, end: int) -> dict[str, Any]:
        assert answer.logprobs is not None
        token_ids, entries = answer.token_ids[begin:end], answer.logprobs[begin:end]
        if self._chat:
            return {
                "content": [
                    {
                        **_entry(token_id, entry.logprob),
                        "top_logprobs": [_entry(other, logprob) for other, logprob in entry.top],
                    }
                    for token_id, entry in zip(token_ids, entries, strict=True)
                ],
                "refusal": None,
            }
        return {
            "tokens": [vocabulary.decode([token_id]) for token_id in token_ids],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [_top(token_id, entry) for token_id, entry in zip(token_ids, entries, strict=True)],
            "text_offset": [answer.ends[i - 1] if i else 0 for i in range(begin, end)],
        }


def usage(choices: Sequence[Choice], *, speculates: bool) -> dict[str, Any]:
    """OpenAI's: each prompt counts once, however many choices it has."""
    prompts = {choice.prompt_index: choice.request for choice in reversed(choices)}.values()
    prompt_tokens = sum(request.prompt_tokens for request in prompts)
    completion_tokens = sum(choice.request.num_output for choice in choices)
    fields: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in prompts)},
    }
    if speculates:
        total, steps = DraftCounts(), 0
        for choice in choices:
            total.num_drafts += choice.request.num_drafts
            total.num_draft_tokens += choice.request.num_draft_tokens
            total.num_accepted_tokens += choice.request.num_accepted_tokens
            steps += choice.request.num_steps
        drafters = {DRAFTER: total} if total.num_drafts else {}
        fields["speculation"] = usage_fields(SpeculationUsage(num_steps=steps, drafters=drafters), completion_tokens)
    return fields


def to_json(data: object) -> str:
    return json.dumps(data, separators=(",", ":"))


def _segments(choice: Choice, num_tokens: int, num_accepted: int) -> str:
    """The field `speculation` of a chunk: which drafter, or whether the model itself, made which part of its text."""
    ends, first = choice.answer.ends, choice.num_sent
    segments = []
    for origin, begin, end in ((DRAFTER, 0, num_accepted), (TARGET, num_accepted, num_tokens)):
        if begin < end:
            start = ends[first + begin - 1] if first + begin else 0
            text = choice.answer.text[start : ends[first + end - 1]]
            segments.append({"text": text, "origin": origin, "tokens": end - begin})
    return f',"speculation":{to_json({"segments": segments})}'


def _entry(token_id: int, logprob: float) -> dict[str, Any]:
    raw = vocabulary.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def _top(token_id: int, entry: TokenLogprobs) -> dict[str, float]:
    top = {vocabulary.decode([other]): logprob for other, logprob in entry.top}
    top.setdefault(vocabulary.decode([token_id]), entry.logprob)
    return top
