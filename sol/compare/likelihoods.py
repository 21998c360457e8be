"""How differently do A and B see the same text? Both are shown A's answers and asked for the logprobs of each token.

Texts can be equal by luck and differ by a near tie; the distributions behind them cannot hide. Two forms are known:
vLLM's `prompt_logprobs`, and `echo` with `logprobs` on completions, which OpenAI's first API had. Which of them an
endpoint offers, it is asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from sol.bench.endpoint import Endpoint, replace
from sol.bench.http import Pool, fetch
from sol.bench.statistics import NOTHING, Estimate, Samples, mean

_TOP: Final = 5

_FORMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "prompt_logprobs": {"prompt_logprobs": _TOP},
    "echo": {"echo": True, "logprobs": _TOP},
}


@dataclass(frozen=True, slots=True)
class Position:
    """One token of a text, given those before it."""

    token: str
    logprob: float
    top: Mapping[str, float]
    """Logprobs of the likeliest tokens, and of this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihoods:
    """Over all tokens of the texts; the intervals treat each text as one sample."""

    offered: bool
    reason: str = ""
    """Why there are none."""
    num_texts: int = 0
    num_tokens: int = 0
    kl: Estimate = NOTHING
    """KL(A ‖ B) a token in nats, over the tokens that both list and all others taken as one: never more than the
    whole divergence (that is what merging outcomes does to it)."""
    top1: Estimate = NOTHING
    """Share of places at which both hold the same token likeliest."""
    logprob: Estimate = NOTHING
    """Mean of B's logprob less A's."""


async def compare_likelihoods(a: Endpoint, b: Endpoint, texts: Sequence[str], seconds: float) -> Likelihoods:
    """Both endpoints on the same texts, one after another."""
    if not texts:
        return Likelihoods(offered=False, reason="there are no texts to show to both")
    pools = a.pool(), b.pool()
    try:
        forms = []
        for name, endpoint, pool in zip("AB", (a, b), pools, strict=True):
            form = await _offered(endpoint, pool, texts[0], seconds)
            if form is None:
                return Likelihoods(offered=False, reason=f"{name} does not offer logprobs of a prompt")
            forms.append(form)
        ours: list[Sequence[Position]] = []
        theirs: list[Sequence[Position]] = []
        for text in texts:
            for endpoint, pool, form, seen in zip((a, b), pools, forms, (ours, theirs), strict=True):
                found = await _ask(endpoint, pool, form, text, seconds)
                seen.append(found if not isinstance(found, str) else [])
        return compare_positions(ours, theirs)
    finally:
        for pool in pools:
            pool.close()


async def read_positions(endpoint: Endpoint, texts: Sequence[str], seconds: float) -> list[list[Position]] | None:
    """Of each text as one endpoint sees it, for two that cannot run at the same time; None: it offers no logprobs of a
    prompt. A text that it does not answer in `seconds` has no positions."""
    pool = endpoint.pool()
    try:
        form = await _offered(endpoint, pool, texts[0], seconds) if texts else None
        if form is None:
            return None
        found = [await _ask(endpoint, pool, form, text, seconds) for text in texts]
        return [[] if isinstance(one, str) else one for one in found]
    finally:
        pool.close()


def compare_positions(ours: Sequence[Sequence[Position]], theirs: Sequence[Sequence[Position]]) -> Likelihoods:
    """Of each text as A and as B see it; texts that one of them has not answered are left out."""
    kls, agreements, shifts = [], [], []
    for first, second in zip(ours, theirs, strict=True):
        if not first or not second:
            continue
        if [position.token for position in first] != [position.token for position in second]:
            return Likelihoods(offered=False, reason="A and B cut the same text into other tokens")
        both = list(zip(first, second, strict=True))
        kls.append([divergence(one.top, other.top) for one, other in both])
        agreements.append([float(_likeliest(one) == _likeliest(other)) for one, other in both])
        shifts.append([other.logprob - one.logprob for one, other in both])
    if not kls:
        return Likelihoods(offered=False, reason="no text was answered by both with logprobs")
    return Likelihoods(
        offered=True,
        num_texts=len(kls),
        num_tokens=sum(map(len, kls)),
        kl=mean(Samples.grouped(kls)),
        top1=mean(Samples.grouped(agreements)),
        logprob=mean(Samples.grouped(shifts)),
    )


def divergence(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """KL in nats of what two lists of logprobs say: over the tokens in both, and all the rest as one outcome."""
    shared = [token for token in first if token in second]
    p = np.exp([first[token] for token in shared])
    q = np.exp([second[token] for token in shared])
    rest_p, rest_q = max(0.0, 1.0 - float(p.sum())), max(0.0, 1.0 - float(q.sum()))
    total = float(np.sum(p * (np.log(np.maximum(p, 1e-300)) - np.log(np.maximum(q, 1e-300)))))
    if rest_p > 1e-6:  # below that it is the rounding of the lists
        total += rest_p * math.log(rest_p / max(rest_q, 1e-9))
    return max(0.0, total)


async def _offered(endpoint: Endpoint, pool: Pool, text: str, seconds: float) -> str | None:
    for form in _FORMS:
        if not isinstance(await _ask(endpoint, pool, form, text, seconds), str):
            return form
    return None


async def _ask(endpoint: Endpoint, pool: Pool, form: str, text: str, seconds: float) -> list[Position] | str:
    """The positions of a text but its first, which follows nothing; or why there are none."""
    whole = replace(endpoint, route="completions", stream=False, counting="chunks", body={})
    body = whole.completion_body(text, 1, {"temperature": 0.0, **_FORMS[form]})
    try:
        status, content = await fetch(pool, whole.post(body), seconds=seconds)
    except (OSError, TimeoutError) as error:
        return str(error) or type(error).__name__
    if status != 200:
        return f"status {status}"
    try:
        document = msgspec.json.decode(content)
        choice = document["choices"][0]
        found = _of_prompt(choice) if form == "prompt_logprobs" else _of_echo(choice, document.get("usage") or {})
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError, ValueError):
        found = []
    return found or "no logprobs"


def _of_prompt(choice: Mapping[str, Any]) -> list[Position]:
    """vLLM's: of each token an object from token ids to `{"logprob", "rank", "decoded_token"}`. The token itself is
    listed first, the likeliest follow."""
    positions = []
    for listed in choice["prompt_logprobs"]:
        if listed is None:
            continue
        entries: dict[str, float] = {}
        for number, entry in listed.items():
            text = str(entry.get("decoded_token") or number)
            # Parts of characters all look alike; two ids are two tokens whatever they look like.
            entries[text if text not in entries else f"{text} {number}"] = float(entry["logprob"])
        token, logprob = next(iter(entries.items()))
        positions.append(Position(token, logprob, entries))
    return positions


def _of_echo(choice: Mapping[str, Any], usage: Mapping[str, Any]) -> list[Position]:
    """OpenAI's first form: parallel lists over prompt and output."""
    found = choice["logprobs"]
    size = len(found["tokens"]) - int(usage.get("completion_tokens", 1))
    rows = list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))[:size]
    return [
        Position(str(token), float(logprob), {**{str(name): float(value) for name, value in top.items()},
                                              str(token): float(logprob)})
        for token, logprob, top in rows
        if logprob is not None and top is not None
    ]  # fmt: skip


def _likeliest(position: Position) -> str:
    return max(position.top, key=lambda token: position.top[token])
