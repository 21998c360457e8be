"""What each step computes.

There are no phases. A request has tokens (its prompt and what it has generated) and the KV cache of some of them;
each step moves `num_computed_tokens` toward the number of tokens, as far as the step's budget goes. A first prompt, a
chunk of one, what a prefix hit leaves over, the resumption after a preemption and the next token of a running stream
are the same rule. When a step reaches a request's last token, the runner samples the next one.

Running requests come first, then waiting ones, both in the policy's order. By first come, first served, all running
requests are older than all waiting ones; by priority, a waiting one that is more urgent than one that runs comes before
them all, and takes the other's place if there is no other.

Memory: a request gets the blocks of all the tokens it has when it is admitted, so a prefill never stops half-way for
want of blocks; after that it needs one more each `block_size` generated tokens. If none is free, the last running
request (the youngest, or the least urgent) is preempted: its blocks are freed, its tokens kept, and its KV cache is
computed again later (or found). The last itself waits with the blocks it has. The first always gets what it needs,
because the pool holds at least one request of the model's full length; so everything finishes.

Working ahead: a step may be planned before the one before it is read. It is then planned as if no request ended: a
token that has been planned and not read counts (`num_pending_tokens`), though nobody knows it yet. Where the result
says otherwise, what was planned too much is dropped when it is read. Blocks that are given back meanwhile may still
be written by the step that is under way; steps run in the order of their plans, so whoever is given them next writes
after that.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from sol.config import SchedulerConfig
from sol.engine.block_pool import BlockPool
from sol.engine.deadlines import Deadlines
from sol.engine.policy import make_policy, victim
from sol.engine.prefix_cache import PrefixCache
from sol.engine.request import Request, make_request
from sol.engine.speculation import PlannedRow, PlannedStep, Speculation, origins
from sol.engine.types import (
    CachedRequestData,
    EngineRequest,
    EngineStats,
    FinishReason,
    NewRequestData,
    RequestOutput,
    SchedulerOutput,
    StepOutput,
    TokenLogprobs,
)
from sol.errors import ConfigError, RequestError


@dataclass(slots=True)
class _Budget:
    """What is left of a step."""

    tokens: int
    prefill_tokens: int
    prompt_rows: int
    """Rows of logits after prompt tokens; those of the requests' last tokens are beside them."""

    def grant(self, request: Request) -> int:
        """How many tokens the request may compute; 0 if its turn does not come in this step."""
        count = min(request.num_uncomputed_tokens, self.tokens)
        if request.prefilling:
            count = min(count, self.prefill_tokens)
            if request.lacks_prompt_logprobs:
                count = min(count, self.prompt_rows)
        return count

    def has_room(self, request: Request) -> bool:
        """Whether a request that has yet to get its place could compute anything."""
        return min(self.tokens, self.prefill_tokens, self.prompt_rows if request.lacks_prompt_logprobs else 1) > 0

    def spend(self, request: Request, count: int, num_prompt_logprobs: int) -> None:
        self.tokens -= count
        self.prompt_rows -= num_prompt_logprobs
        if request.prefilling:
            self.prefill_tokens -= count


class Scheduler:
    """Plans steps and reads their results. Not thread-safe; knows no tensor and no clock but for time stamps."""

    def __init__(self, config: SchedulerConfig, speculation: Speculation | None = None) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_num_prefill_tokens", "block_size"):
            if getattr(config, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(config, name)}", param=name)
        if config.num_blocks * config.block_size < config.max_model_len:
            raise ConfigError(
                f"max_model_len is {config.max_model_len} tokens, but the KV cache has room for "
                f"{config.num_blocks * config.block_size} ({config.num_blocks} blocks of {config.block_size}): lower "
                "max_model_len, or raise kv_cache_memory_bytes or gpu_memory_utilization",
                param="max_model_len",
            )
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self._cache = PrefixCache(self.pool, config.block_size) if config.enable_prefix_caching else None
        self._policy = make_policy(config)
        self._deadlines = Deadlines(lambda request: len(self._find(request)) * config.block_size)
        self._running: list[Request] = []
        """In the policy's order."""
        self._requests: dict[str, Request] = {}
        """Running and waiting."""
        self._removed: list[str] = []
        """Left the runner since the last plan."""
        self._preempted: set[str] = set()
        """Of those, the ones that wait to come back."""
        self._unread: deque[PlannedStep] = deque()
        """Plans that have not been read, oldest first."""
        self._speculation = speculation
        self.works_ahead = False
        """Whether steps are usually planned before the ones before them are read"""
        self._next_sequence = 0
        self._stats = EngineStats()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add(self, wanted: EngineRequest) -> None:
        """Queue a request. Raises `RequestError` if it can never be answered or its id is in use."""
        if wanted.request_id in self._requests:
            raise RequestError(f"request_id {wanted.request_id!r} is in use", param="request_id")
        request = make_request(wanted, max_model_len=self.config.max_model_len, sequence=self._next_sequence)
        self._next_sequence += 1
        self._requests[request.request_id] = request
        self._policy.add(request)
        self._deadlines.add(request)
        if self._speculation:
            self._speculation.add(request)

    def finish(self, request_id: str, reason: FinishReason, error: str | None = None) -> RequestOutput | None:
        """End a request from outside, at any moment. Its last output; None if there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.block_ids:
            self._running.remove(request)
        output = self._output(request, [], None, reason, error=error)
        self._leave(request)
        return output

    def finish_all(self, reason: FinishReason, error: str | None = None) -> list[RequestOutput]:
        return [o for request_id in list(self._requests) if (o := self.finish(request_id, reason, error)) is not None]

    def shed(self, now: float) -> list[RequestOutput]:
        """End those that wait and could not be answered by their deadlines any more."""
        return [self._end_hopeless(request) for request in self._deadlines.take_hopeless(now, self._requests)]

    def _end_hopeless(self, request: Request) -> RequestOutput:
        waited = time.monotonic() - request.arrival_time
        error = f"the request could not be answered by its deadline; it was given up after {waited:.1f} s in the queue"
        output = self._output(request, [], None, "error", error=error)
        output.deadline_exceeded = True
        self._leave(request)
        return output

    # ── planning ─────────────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> SchedulerOutput | None:
        """Plan one step, which must be carried out. Only with unfinished requests.

        None if everything depends on a result that has not been read, or had better wait for it; never if there is no
        such result.
        """
        if self._waits():
            return None
        step = PlannedStep([], ahead=bool(self._unread))
        self._unread.append(step)
        plan = SchedulerOutput(
            num_scheduled_tokens={},
            new_requests=[],
            cached_requests=[],
            removed_request_ids=self._removed,
            preempted_request_ids=self._preempted,
        )
        budget = self._budget()
        if self._policy.preemptive:
            self._schedule_urgent(plan, budget)
        self._schedule_running(plan, budget)
        self._schedule_waiting(plan, budget)
        if not plan.num_scheduled_tokens:
            self._unread.pop()
            if not self._unread:
                raise RuntimeError("the scheduler made an empty plan")
            return None
        self._removed, self._preempted = [], set()
        if self._speculation:
            most = self._most_drafts(
                budget.tokens,
                num_tokens=sum(plan.num_scheduled_tokens.values()),
                num_sampled=sum(row.sampled + row.num_prompt_logprobs for row in step.rows),
            )
            self._speculation.extend(
                plan, step, max_tokens=most, reserve=self._reserver(), works_ahead=self.works_ahead
            )
        step.num_tokens = sum(plan.num_scheduled_tokens.values())
        return plan

    def _budget(self) -> _Budget:
        """A step that also decodes computes a bounded number of prompt tokens, and no prompt keeps a decode waiting.

        At least one prompt token is computed all the same, so that prompts always move.
        """
        total = self.config.max_num_batched_tokens
        rows = total
        if self.config.max_num_logits_rows is not None:
            rows = max(1, self.config.max_num_logits_rows - self.config.max_num_seqs)
        decoding = sum(r.num_uncomputed_tokens for r in self._running if not r.prefilling)
        if not decoding:
            return _Budget(total, total, rows)
        return _Budget(total, max(1, min(self.config.max_num_prefill_tokens, total - decoding)), rows)

    def _schedule_running(self, plan: SchedulerOutput, budget: _Budget) -> None:
        for request in self._running.copy():
            count = budget.grant(request)
            if count == 0 or not request.block_ids:  # no turn in this step, or preempted since the loop began
                continue
            if request.request_id in plan.num_scheduled_tokens:  # urgent, and new
                continue
            needed = self._num_blocks(request.num_computed_tokens + count) - len(request.block_ids)
            if not self._make_room(plan, request, needed):
                continue
            new_block_ids = self.pool.allocate(needed) if needed > 0 else []
            request.block_ids += new_block_ids
            entry = CachedRequestData(
                request_id=request.request_id,
                num_computed_tokens=request.num_computed_tokens,
                new_block_ids=new_block_ids,
            )
            plan.cached_requests.append(entry)
            self._advance(plan, budget, request, count, entry)

    def _waits(self) -> bool:
        """Whether the steps under way had better be read before another one is planned.

        Nothing of a request can follow a step that verifies its drafts, or after which somebody writes ahead for it. If
        the others went on, there would be two batches in turns, each as slow as both together would be; so they wait.
        """
        if self._speculation is None or not any(request.num_pending_tokens for request in self._running):
            return False
        if any(request.num_verifying or request.num_draftings for request in self._running):
            return True
        decoding = [request for request in self._running if not request.prefilling]
        count = len(decoding)
        most = self._most_drafts(self.config.max_num_batched_tokens - count, num_tokens=count, num_sampled=count)
        return self._speculation.waits(decoding, max_tokens=most)

    def _most_drafts(self, left: int, *, num_tokens: int, num_sampled: int) -> int:
        """How many a step has room for that computes `num_tokens`, samples `num_sampled` requests and may compute
        `left` tokens more."""
        config, most = self.config, left
        if config.max_num_logits_rows is not None:
            most = min(most, config.max_num_logits_rows - num_sampled)
        if config.num_invariant_tokens is not None and num_tokens <= config.num_invariant_tokens:
            # Larger steps round differently among themselves; there is nothing to keep.
            most = min(most, config.num_invariant_tokens - num_tokens)
        return max(0, most)

    def _reserver(self) -> Callable[[PlannedRow, int], int]:
        """Gives a row of the plan just made more blocks, but for the ones that running requests may soon need."""
        growing: int | None = None

        def reserve(row: PlannedRow, num_tokens: int) -> int:
            nonlocal growing
            request, entry = row.request, row.entry
            needed = self._num_blocks(num_tokens) - len(request.block_ids)
            if needed < 1:
                return num_tokens
            if growing is None:  # most steps never ask
                growing = sum(self._may_grow(request) for request in self._running)
            count = min(needed, self.pool.num_free - growing)
            if count > 0:
                block_ids = self.pool.allocate(count)
                request.block_ids += block_ids
                (entry.block_ids if isinstance(entry, NewRequestData) else entry.new_block_ids).extend(block_ids)
            return min(num_tokens, len(request.block_ids) * self.config.block_size)

        return reserve

    def _schedule_waiting(self, plan: SchedulerOutput, budget: _Budget) -> None:
        growing = sum(self._may_grow(request) for request in self._running)
        while len(self._policy) and len(self._running) < self.config.max_num_seqs:
            request = self._policy.next()
            if not budget.has_room(request) or request.num_pending_tokens:
                break  # the latter was preempted and waits for the result of its last step
            found = self._find(request)
            needed = self._num_blocks(request.num_tokens) - len(found)
            # One block stays free for each running request that may ask for another: to admit a request only to
            # preempt it at once would cost more than to let it wait.
            if needed + growing > self.pool.num_free - self.pool.num_free_among(found):
                break
            self._start(plan, budget, request, found, needed)
            growing += self._may_grow(request)

    def _schedule_urgent(self, plan: SchedulerOutput, budget: _Budget) -> None:
        """Give requests that wait, and are more urgent than one that runs, their places; if there is none, the place of
        the least urgent. Before anything else is planned, so that nobody in the plan is preempted, and the prompts of
        the others do not take the step's tokens."""
        key = self._policy.key
        while len(self._policy) and self._running:
            request = self._policy.next()
            if key(request) > key(self._running[-1]) or not budget.has_room(request) or request.num_pending_tokens:
                break
            found = self._find(request)
            needed = self._num_blocks(request.num_tokens) - len(found)
            growing = sum(self._may_grow(other) for other in self._running)
            free = self.pool.num_free - self.pool.num_free_among(found)
            if len(self._running) < self.config.max_num_seqs and needed + growing <= free:
                self._start(plan, budget, request, found, needed)
            elif self._could_take_place(plan, request, found, needed):
                self._preempt(self._running[-1])
            else:
                break

    def _could_take_place(self, plan: SchedulerOutput, request: Request, found: list[int], needed: int) -> bool:
        """Whether it would fit if all less urgent ones gave way: nobody is to lose a place that helps nobody."""
        key = self._policy.key
        last = [r for r in self._running if key(r) > key(request) and r.request_id not in plan.num_scheduled_tokens]
        if not last or last[-1] is not self._running[-1]:
            return False
        others = [other for other in self._running if other not in last]
        freed = {block_id for other in last for block_id in other.block_ids}
        freed -= {block_id for other in others for block_id in other.block_ids}
        freed -= set(found)
        free = self.pool.num_free - self.pool.num_free_among(found) + len(freed)
        return needed + sum(self._may_grow(other) for other in others) <= free

    def _start(self, plan: SchedulerOutput, budget: _Budget, request: Request, found: list[int], needed: int) -> None:
        self._admit(request, found, needed)
        entry = NewRequestData(
            request_id=request.request_id,
            token_ids=request.token_ids.copy(),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=request.block_ids.copy(),
            params=request.params,
            seed=request.seed,
            choice_index=request.choice_index,
            eos_token_ids=request.eos_token_ids,
            tenant=request.speculation.tenant if request.speculation else None,
        )
        plan.new_requests.append(entry)
        self._advance(plan, budget, request, budget.grant(request), entry)

    def _find(self, request: Request) -> list[int]:
        """Blocks that need not be computed. Where a prompt's logprobs are wanted its KV cache alone is not enough."""
        if self._cache is None:
            return []
        if request.lacks_prompt_logprobs:
            return self._cache.find(request)[: len(request.prompt_logprobs) // self.config.block_size]
        return self._cache.find(request)

    def _admit(self, request: Request, found: list[int], needed: int) -> None:
        self._policy.remove(request)
        self.pool.acquire(found)
        request.block_ids = found + self.pool.allocate(needed)
        request.num_computed_tokens = len(found) * self.config.block_size
        request.num_published_blocks = len(found)
        request.prefilling = True
        insort(self._running, request, key=self._policy.key)
        if request.num_cached_tokens is None:  # not again after a preemption
            request.num_cached_tokens = request.num_computed_tokens
            request.scheduled_time = time.monotonic()
            if self._cache:
                self._stats.prefix_cache_queries += request.num_prompt_tokens
                self._stats.prefix_cache_hits += request.num_cached_tokens

    def _advance(
        self,
        plan: SchedulerOutput,
        budget: _Budget,
        request: Request,
        count: int,
        entry: NewRequestData | CachedRequestData,
    ) -> None:
        decoding = not request.prefilling
        start, wanted = request.num_computed_tokens, 0
        if request.prefilling and request.lacks_prompt_logprobs:
            wanted = max(0, min(count, request.num_prompt_tokens - 1 - start))
        if wanted:
            plan.num_prompt_logprobs[request.request_id] = wanted
        budget.spend(request, count, wanted)
        plan.num_scheduled_tokens[request.request_id] = count
        request.num_computed_tokens += count
        request.prefilling = request.num_uncomputed_tokens > 0
        request.num_pending_tokens += not request.prefilling
        self._unread[-1].rows.append(
            PlannedRow(
                request,
                entry,
                sampled=not request.prefilling,
                decoding=decoding and not request.prefilling,
                prompt_start=start,
                num_prompt_logprobs=wanted,
            )
        )
        if self._cache:
            self._cache.publish(request)

    def _make_room(self, plan: SchedulerOutput, request: Request, needed: int) -> bool:
        """Preempt less urgent requests until `needed` blocks are free; False if that does not suffice."""
        while needed > self.pool.num_free:
            last = victim(self._running, request)
            if last is None or last.request_id in plan.num_scheduled_tokens:
                return False
            self._preempt(last)
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._leave_runner(request)
        self._preempted.add(request.request_id)
        request.draft = None
        self._policy.put_back(request)
        self._stats.num_preemptions += 1

    def _leave_runner(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0
        self._removed.append(request.request_id)

    def _leave(self, request: Request) -> None:
        """Forget a request. Whoever calls takes it off `_running`, if it is there."""
        del self._requests[request.request_id]
        if self._speculation:
            self._speculation.remove(request)
        if request.block_ids:
            self._leave_runner(request)
        else:
            self._policy.remove(request)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _may_grow(self, request: Request) -> bool:
        """Whether it can need more blocks than it has. The KV cache of a request's last token is never computed."""
        return self._num_blocks(request.max_num_tokens - 1) > len(request.block_ids)

    # ── reading results ──────────────────────────────────────────────────────────────────────────────────────────

    def update_from_output(self, result: StepOutput, seconds: float | None = None) -> list[RequestOutput]:
        """Read the result of the oldest plan that has not been read; `seconds` is how long it took, if that is known.

        Appends what was sampled, ends what is at its end, and frees its blocks. A row may bring several tokens
        (accepted drafts); those after the one that ends the request are dropped, before anything is emitted or
        published, and so is what later plans sample for it. Raises `RuntimeError` if the result does not answer the
        plan.
        """
        step = self._unread.popleft()
        if seconds is not None:
            self._deadlines.observe(step.num_tokens, seconds)
        if self._speculation:
            rows = [row for row in step.rows if self._requests.get(row.request.request_id) is row.request]
            self._speculation.observe(step, rows, result, seconds)
        outputs = []
        for row in step.rows:
            output = self._read(row, result)
            if output is not None:
                outputs.append(output)
        self._running = [request for request in self._running if request.block_ids]
        return outputs

    def _read(self, row: PlannedRow, result: StepOutput) -> RequestOutput | None:
        request = row.request
        request.num_pending_tokens -= row.most_new_tokens
        request.num_verifying -= row.num_drafts
        request.num_draftings -= row.writes_ahead
        if self._requests.get(request.request_id) is not request:  # ended since it was planned
            return None
        if request.request_id in result.errors:
            if self._cache:
                self._cache.withdraw(request)  # whatever is wrong may be in its KV cache
            output = self._output(request, [], None, "error", error=result.errors[request.request_id])
            self._leave(request)
            return output
        if row.num_prompt_logprobs:
            entries = result.prompt_logprobs.get(request.request_id, [])
            if len(entries) != row.num_prompt_logprobs:
                raise RuntimeError(f"the runner gave {len(entries)} logprobs of the prompt of {request.request_id!r}")
            request.take_prompt_logprobs(row.prompt_start, entries)
        sampled = result.sampled_token_ids.get(request.request_id, [])
        if not int(row.sampled) <= len(sampled) <= row.most_new_tokens:
            raise RuntimeError(f"the runner sampled {len(sampled)} tokens for {request.request_id!r} out of turn")
        return self._take(row, sampled, result) if sampled else None

    def _take(self, row: PlannedRow, sampled: list[int], result: StepOutput) -> RequestOutput:
        request = row.request
        logprobs = result.logprobs.get(request.request_id)
        if request.params.logprobs is not None and (logprobs is None or len(logprobs) != len(sampled)):
            raise RuntimeError(f"the runner gave no logprobs for {request.request_id!r}")
        if not request.num_output_tokens:
            request.first_token_time = time.monotonic()
            self._stats.num_prompt_tokens += request.num_prompt_tokens
        num_accepted = len(sampled) - 1
        if request.block_ids:  # not preempted since
            request.num_computed_tokens -= row.num_drafts - num_accepted
        kept = []
        reason = None
        for token_id in sampled:
            kept.append(token_id)
            reason = request.append(token_id)
            if reason is not None:
                break
        self._stats.num_generated_tokens += len(kept)
        if self._speculation:
            self._speculation.count(row, min(num_accepted, len(kept)))
        output = self._output(request, kept, logprobs, reason, origins=origins(row, len(kept), num_accepted))
        if self._cache:  # accepted drafts may have filled blocks, those of a request that ends as well
            self._cache.publish(request)
        if reason is not None:
            self._leave(request)
        else:
            request.draft = result.drafts.get(request.request_id)
        return output

    def _output(
        self,
        request: Request,
        new_token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        reason: FinishReason | None,
        *,
        error: str | None = None,
        origins: list[str] | None = None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            logprobs=None if request.params.logprobs is None else (logprobs or [])[: len(new_token_ids)],
            prompt_logprobs=self._prompt_logprobs(request, new_token_ids),
            finish_reason=reason,
            stop_token_id=request.stop_token() if reason == "stop" else None,
            error=error,
            num_cached_tokens=request.num_cached_tokens or 0,
            scheduled_time=request.scheduled_time,
            first_token_time=request.first_token_time,
            origins=origins,
            speculation=self._speculation.usage(request, finished=reason is not None) if self._speculation else None,
        )

    @staticmethod
    def _prompt_logprobs(request: Request, new_token_ids: list[int]) -> list[TokenLogprobs] | None:
        if request.params.prompt_logprobs is None or not new_token_ids:
            return None
        return request.prompt_logprobs if request.num_output_tokens == len(new_token_ids) else None

    # ── watching ─────────────────────────────────────────────────────────────────────────────────────────────────

    def take_stats(self) -> EngineStats:
        """The state now, and what was counted since the last call."""
        stats, self._stats = self._stats, EngineStats()
        stats.num_running = len(self._running)
        stats.num_waiting = len(self._policy)
        stats.kv_cache_usage = self.pool.usage
        if self._speculation:
            self._speculation.add_stats(stats)
        return stats

    def check_integrity(self) -> None:
        """Raise `AssertionError` if scheduler, queue and block pool contradict each other."""
        waiting = list(self._policy)
        running_keys, waiting_keys = ([self._policy.key(r) for r in some] for some in (self._running, waiting))
        for keys in (running_keys, waiting_keys) if self._policy.preemptive else (running_keys + waiting_keys,):
            assert keys == sorted(set(keys)), f"requests are out of order: {keys}"
        assert {r.request_id: r for r in self._running + waiting} == self._requests, "a request is lost or stands twice"
        assert len(self._running) <= self.config.max_num_seqs, "more requests run than max_num_seqs"
        pending: Counter[Request] = Counter()
        verifying: Counter[Request] = Counter()
        draftings: Counter[Request] = Counter()
        for row in (row for step in self._unread for row in step.rows):
            pending[row.request] += row.most_new_tokens
            verifying[row.request] += row.num_drafts
            draftings[row.request] += row.writes_ahead
        for name, request in self._requests.items():
            assert request.num_pending_tokens == pending[request], f"{name!r}: pending tokens are miscounted"
            assert request.num_verifying == verifying[request], f"{name!r}: drafts under way are miscounted"
            assert request.num_draftings == draftings[request], f"{name!r}: draftings under way are miscounted"
        for request in waiting:
            assert not request.block_ids, f"{request.request_id!r} waits with blocks"
            assert request.num_computed_tokens == 0, f"{request.request_id!r} waits with computed tokens"
        for request in self._running:
            name, held = request.request_id, len(request.block_ids)
            assert request.num_tokens < request.max_num_tokens, f"{name!r}: past its end"
            assert request.num_uncomputed_tokens >= 0, f"{name!r}: computes past its end"
            assert held >= self._num_blocks(request.num_computed_tokens), f"{name!r}: too few blocks"
            most = request.num_planned_tokens + (self._speculation.most_ahead if self._speculation else 0)
            assert held <= self._num_blocks(most), f"{name!r}: too many blocks"
            if self._cache:
                self._cache.check_integrity(request)
        self.pool.check_integrity([request.block_ids for request in self._running])
