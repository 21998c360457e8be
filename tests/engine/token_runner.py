"""A language model small enough to be checked by hand, with a KV cache that remembers who wrote what.

The next token is a function of the tokens that the row reads *through its block table*, and every slot records the
token, the position and the whole prefix it was written for. Sharing the wrong block, reading one that was never
computed, or losing count after a preemption is therefore an assertion error or a different output.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sol.config import SchedulerConfig
from sol.engine.compiling import Grammars
from sol.engine.core import EngineCore
from sol.engine.scheduler import Scheduler
from sol.engine.speculation import Speculation
from sol.engine.types import (
    Draft,
    EngineInfo,
    EngineRequest,
    NewRequestData,
    SchedulerOutput,
    StepOutput,
    TokenLogprobs,
)
from sol.sampling_params import SamplingParams

VOCAB_SIZE = 64
EOS = 0


def digest(token_ids: list[int]) -> bytes:
    return hashlib.sha256(bytes(token_ids)).digest()


def next_token(token_ids: list[int], seed: int, choice_index: int) -> int:
    """What the model says after `token_ids`."""
    return hashlib.sha256(digest(token_ids) + bytes([seed % 256, choice_index])).digest()[0] % VOCAB_SIZE


def logprobs_of(token_id: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(logprob=-token_id / 8, rank=1, top=[(token_id, -token_id / 8)] * count)


def expected_output(request: EngineRequest, max_model_len: int) -> tuple[list[int], str]:
    """Tokens and finish reason of a request that has the engine to itself, straight from the rules."""
    params, tokens = request.params, list(request.prompt_token_ids)
    out: list[int] = []
    while True:
        out.append(next_token(tokens, request.seed, request.choice_index))
        tokens.append(out[-1])
        if len(out) >= params.min_tokens:
            if out[-1] in request.eos_token_ids and not params.ignore_eos:
                return out, "stop"
            if out[-1] in params.stop_token_ids:
                return out, "stop"
        if len(out) == params.max_tokens or len(tokens) == max_model_len:
            return out, "length"


@dataclass
class _Row:
    data: NewRequestData
    tokens: list[int]
    block_ids: list[int]
    num_computed: int


class TokenRunner:
    """Verifies the drafts of a plan, and drafts where it says so: about `right` percent of the tokens are right."""

    def __init__(self, config: SchedulerConfig, right: int = 70) -> None:
        self.config = config
        self.right = right
        self.num_accepted_tokens = 0
        self.rows: dict[str, _Row] = {}
        self.slots: list[tuple[int, int, bytes] | None] = [None] * (config.num_blocks * config.block_size)
        self.plans: list[SchedulerOutput] = []
        self.num_computed_tokens = 0
        self.breaks_at: dict[str, int] = {}
        """By request: behind so many tokens its logits are not finite."""
        self._writing: list[set[str]] = []
        """Of each step that has not been read: whose blocks somebody writes into when it is"""

    def submit(self, plan: SchedulerOutput) -> Callable[[], StepOutput]:
        busy = set().union(*self._writing) & set(plan.num_scheduled_tokens)
        assert not busy, f"{busy} are planned while somebody drafts for them"
        result = self.execute(plan)
        self._writing.append(
            {name for name, wish in plan.proposals.items() if "caching" in (wish.drafter, wish.fallback)}
        )

        def read() -> StepOutput:
            self._writing.pop(0)
            return result

        return read

    def execute(self, plan: SchedulerOutput) -> StepOutput:
        self.plans.append(plan)
        self._update_rows(plan)
        self._check_budget(plan)
        # As in a layer: everything is written before anything is read.
        written = Counter(slot for name in plan.num_scheduled_tokens for slot in self._write(plan, name))
        assert max(written.values()) == 1, "two rows write one slot"
        sampled: dict[str, list[int]] = {}
        logprobs: dict[str, list[TokenLogprobs]] = {}
        errors: dict[str, str] = {}
        prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        for name, count in plan.num_scheduled_tokens.items():
            row = self.rows[name]
            drafts = plan.draft_token_ids.get(name, [])
            if judged := plan.num_prompt_logprobs.get(name, 0):
                top = row.data.params.prompt_logprobs
                assert top is not None
                assert judged <= count
                assert row.num_computed + judged < row.data.num_prompt_tokens, "the last prompt token is sampled after"
                rest = row.tokens[row.num_computed + 1 :][:judged]
                prompt_logprobs[name] = [logprobs_of(token, top) for token in rest]
            row.num_computed += count
            self.num_computed_tokens += count
            read = self._read(row, drafts)
            if row.num_computed < len(row.tokens) + len(drafts):
                continue
            read = read[: len(row.tokens)]
            sampled[name] = []
            breaks_at = self.breaks_at.get(name)
            for draft in [*drafts, None]:
                if breaks_at is not None and len(row.tokens) + len(sampled[name]) >= breaks_at:
                    break
                token = next_token(read + sampled[name], row.data.seed, row.data.choice_index)
                sampled[name].append(token)
                if token != draft:
                    break
            if not sampled[name]:
                del sampled[name]
                errors[name] = "the logits are not finite"
                row.tokens.append(0)  # a step may have been planned after this one
                continue
            num_accepted = len(sampled[name]) - 1
            self.num_accepted_tokens += num_accepted
            row.num_computed -= len(drafts) - num_accepted
            row.tokens += sampled[name]
            wanted = row.data.params.logprobs
            if wanted is not None:
                logprobs[name] = [logprobs_of(token, wanted) for token in sampled[name]]
        result = StepOutput(
            sampled_token_ids=sampled, logprobs=logprobs, errors=errors, prompt_logprobs=prompt_logprobs
        )
        for name, wish in plan.proposals.items():
            if name in errors:
                continue
            row = self.rows[name]
            if wish.drafter == "caching":
                room = len(row.block_ids) * self.config.block_size
                assert room >= len(row.tokens) + wish.max_tokens - 1, "a drafter has no blocks to write into"
            token_ids = self._draft(row, wish.max_tokens)
            if token_ids:
                by_chance = wish.drafter == "caching" and row.data.seed % 2 == 1
                result.drafts[name] = Draft(drafter=wish.drafter, token_ids=token_ids, scores=None, sampled=by_chance)
        return result

    def _draft(self, row: _Row, max_tokens: int) -> list[int]:
        tokens = row.tokens.copy()
        rest = digest(tokens)
        for number in range(rest[0] % (max_tokens + 1)):
            token = next_token(tokens, row.data.seed, row.data.choice_index)
            tokens.append(token if rest[1 + number % 24] % 100 < self.right else (token + 1) % VOCAB_SIZE)
        return tokens[len(row.tokens) :]

    def _update_rows(self, plan: SchedulerOutput) -> None:
        for name in plan.removed_request_ids:
            del self.rows[name]
        for new in plan.new_requests:
            assert new.request_id not in self.rows, "a request is new twice"
            assert len(new.token_ids) > new.num_computed_tokens, "nothing is left to compute"
            self.rows[new.request_id] = _Row(new, list(new.token_ids), list(new.block_ids), new.num_computed_tokens)
        for cached in plan.cached_requests:
            row = self.rows[cached.request_id]
            assert row.num_computed == cached.num_computed_tokens, "scheduler and runner count differently"
            row.block_ids += cached.new_block_ids
        names = [r.request_id for r in plan.new_requests] + [r.request_id for r in plan.cached_requests]
        assert sorted(names) == sorted(plan.num_scheduled_tokens), "a row is not described, or not planned"

    def _check_budget(self, plan: SchedulerOutput) -> None:
        counts = plan.num_scheduled_tokens
        assert all(count > 0 for count in counts.values())
        assert sum(counts.values()) <= self.config.max_num_batched_tokens
        num_drafts = sum(map(len, plan.draft_token_ids.values()))
        num_judged = sum(plan.num_prompt_logprobs.values())
        limit = self.config.max_num_logits_rows
        if limit is not None and (num_drafts or (num_judged and limit > self.config.max_num_seqs)):
            rows = [n for n in counts if self.rows[n].num_computed + counts[n] >= len(self.rows[n].tokens)]
            assert len(rows) + num_drafts + num_judged <= limit
        if num_drafts and self.config.num_invariant_tokens is not None:
            most, without = self.config.num_invariant_tokens, sum(counts.values()) - num_drafts
            assert without > most or without + num_drafts <= most
        assert len(self.rows) <= self.config.max_num_seqs
        decoding = [n for n in counts if self.rows[n].num_computed >= len(self.rows[n].data.token_ids)]
        prefill = sum(count for name, count in counts.items() if name not in decoding)
        if decoding:
            assert prefill <= self.config.max_num_prefill_tokens

    def _slot(self, row: _Row, position: int) -> int:
        return row.block_ids[position // self.config.block_size] * self.config.block_size + (
            position % self.config.block_size
        )

    def _write(self, plan: SchedulerOutput, name: str) -> list[int]:
        row = self.rows[name]
        tokens = row.tokens + plan.draft_token_ids.get(name, [])
        slots = []
        for position in range(row.num_computed, row.num_computed + plan.num_scheduled_tokens[name]):
            slot = self._slot(row, position)
            self.slots[slot] = (tokens[position], position, digest(tokens[: position + 1]))
            slots.append(slot)
        return slots

    def _read(self, row: _Row, drafts: list[int]) -> list[int]:
        tokens = row.tokens + drafts
        read = []
        for position in range(row.num_computed):
            content = self.slots[self._slot(row, position)]
            wanted = (tokens[position], position, digest(tokens[: position + 1]))
            assert content == wanted, f"{row.data.request_id}: wrong KV cache at position {position}"
            read.append(content[0])
        return read


class FailingRunner(TokenRunner):
    """Fails in its second step."""

    error: BaseException = ArithmeticError("out of luck")

    def execute(self, plan: SchedulerOutput) -> StepOutput:
        if len(self.plans) == 1:
            raise self.error
        return super().execute(plan)


def make_config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_num_prefill_tokens": 32,
        "block_size": 4,
        "num_blocks": 64,
        "enable_prefix_caching": True,
    }
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


def make_core(
    config: SchedulerConfig | None = None,
    runner: TokenRunner | None = None,
    work_ahead: int = 0,
    speculation: Speculation | None = None,
    grammars: Grammars | None = None,
) -> EngineCore:
    config = config or make_config()
    info = EngineInfo(
        model="token-runner",
        device="cpu",
        dtype="none",
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        weight_bytes=0,
        kv_cache_bytes=0,
        load_seconds=0.0,
    )
    scheduler = Scheduler(config, speculation)
    return EngineCore(scheduler, runner or TokenRunner(config), info, work_ahead=work_ahead, grammars=grammars)


def make_request(
    request_id: str, prompt: list[int], *, seed: int = 0, choice_index: int = 0, eos: bool = False, **params: object
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=seed,
        choice_index=choice_index,
        eos_token_ids=[EOS] if eos else [],
    )
