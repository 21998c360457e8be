"""Carries out plans on a GPU without waiting for it: the host works on the next step while the device computes one.

A step whose rows all compute one token is a decode step. Its inputs are four numbers a row, copied at once; all else
(positions, slots, forward pass, sampling, the next step's tokens) happens on the device, in a CUDA graph where one was
captured for that many rows. Any other step is launched op by op.

A result is read when it is asked for. Until then the tokens it samples are known to the device alone, and the steps
after it take them from there. Rows whose sampling depends on what the host knows (penalties, logprobs, a grammar …) are
sampled by the host's sampler, which waits for the steps before it; their neighbours are not affected.

A row with drafts is sampled at each of them; which ones were right is seen when the step is read. Nothing follows such
a row before that, and who drafts for the next step does so then.

On a CPU the same code runs on torch's twins of the kernels, without graphs: that is what its tests do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from sol.engine.types import SchedulerOutput, StepOutput
from sol.ops import KVCache, Program
from sol.ops.gpu.batch import DeviceBatch
from sol.ops.program import Ops, run
from sol.runner.decode_graphs import DecodeGraphs, decode_buckets
from sol.runner.device_rows import DeviceRows, pack_parameters
from sol.runner.drafters import Drafters, as_draft
from sol.runner.input_batch import HeldRequest
from sol.runner.model_runner import worst_case, worst_drafts
from sol.runner.staging import Staging
from sol.runner.verify_graphs import Size, VerifyGraphs
from sol.sampling import batched
from sol.sampling.grammar import Grammars
from sol.sampling.prompt import prompt_logprobs
from sol.sampling.sampler import NOT_FINITE_MESSAGE, SampledToken
from sol.speculation.config import VerifyMethod
from sol.speculation.verify import VerifyRow, verify

_Ints = npt.NDArray[np.int64]
_Draft = Callable[["_Step", StepOutput], None]

UNKNOWN: Final = -1
"""In place of a token id or a block id: what the device has."""
WARM_UP_TOKENS: Final = (1, 2, 3, 16, 17, 32, 33, 48, 49, 64, 65, 80, 129, 256, 1023)
"""Sizes of steps for which kernels differ"""


class _Row:
    """A request that the runner holds."""

    __slots__ = ("drafts", "entry", "held", "new_block", "num_planned_tokens")

    def __init__(self, held: HeldRequest, entry: int) -> None:
        self.held = held
        self.entry = entry
        """Of `DeviceRows`"""
        self.new_block = UNKNOWN
        """The block of its next token, if the latest plan gave it"""
        self.num_planned_tokens = held.num_tokens
        """With those that steps sample which are not read yet"""
        self.drafts: list[int] = []
        """That the latest plan verifies"""


class _Sampled:
    """A row that a step samples, after its last token and after each of its drafts."""

    __slots__ = ("by_host", "drafts", "place", "request_id", "row")

    def __init__(self, request_id: str, row: _Row, place: int) -> None:
        self.request_id, self.row = request_id, row
        self.drafts = row.drafts
        self.place = place
        """Of the first of its tokens among the step's"""
        self.by_host: list[SampledToken] | None = None
        """What the host sampled, where it did"""

    @property
    def num_tokens(self) -> int:
        return 1 + len(self.drafts)

    def choose(self, tokens: Sequence[int]) -> list[SampledToken]:
        """`tokens` of the whole step → those that the row emits."""
        if self.by_host is not None:
            return self.by_host
        chosen: list[SampledToken] = []
        for token_id, draft in zip(tokens[self.place :], [*self.drafts, None], strict=False):
            if token_id == batched.NOT_FINITE:
                return chosen or [SampledToken(token_id=token_id, error=NOT_FINITE_MESSAGE)]
            chosen.append(SampledToken(token_id=token_id))
            if token_id != draft:
                break
        return chosen


class _Step:
    """A step that was started."""

    def __init__(
        self,
        plan: SchedulerOutput,
        sampled: list[_Sampled],
        wait: Callable[[], list[int]],
        draft: _Draft,
        write_prompts: Callable[[StepOutput], None] | None,
    ) -> None:
        self.sampled = sampled
        self.output: StepOutput | None = None
        self.plan = plan
        self._wait = wait
        self._draft = draft
        self._write_prompts = write_prompts

    def read(self) -> StepOutput:
        """Wait for the step's end, and let the rows know their tokens. Steps must be read in order."""
        if self.output is not None:
            return self.output
        tokens = self._wait() if self.sampled else []
        output = StepOutput(sampled_token_ids={}, logprobs={}, errors={})
        for one in self.sampled:
            chosen = one.choose(tokens)
            if chosen[0].error is not None:
                output.errors[one.request_id] = chosen[0].error
                one.row.num_planned_tokens -= one.num_tokens
                continue
            token_ids = [token.token_id for token in chosen]
            one.row.held.output_token_ids += token_ids
            one.row.num_planned_tokens -= one.num_tokens - len(token_ids)
            output.sampled_token_ids[one.request_id] = token_ids
            if chosen[0].logprobs is not None:
                output.logprobs[one.request_id] = [token.logprobs for token in chosen if token.logprobs is not None]
        if self._write_prompts is not None:
            self._write_prompts(output)
        self.output = output
        if self.plan.proposals:
            self._draft(self, output)
        return output


class GpuRunner:
    """Implements `sol.engine.core.Runner`. The cache has one block more than the engine knows: the scratch block."""

    def __init__(
        self,
        program: Program,
        ops: Ops,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        device: torch.device,
        drafters: Drafters | None = None,
        verify_method: VerifyMethod = "coupled",
        max_num_logits_rows: int | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`max_num_logits_rows`: most rows of logits in a step; None: one for each request. `grammars` compiles those
        of requests; without it requests must not have any."""
        self._grammars = grammars
        self._drafters = drafters
        self._max_num_logits_rows = max_num_logits_rows or max_num_seqs
        self._verify_method: VerifyMethod = verify_method
        self._program, self._ops, self._kv_cache = program, ops, kv_cache
        self._block_size = kv_cache.block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._device = device
        max_blocks = -(-max_model_len // self._block_size)
        self._entries = DeviceRows(max_num_seqs, max_blocks, kv_cache.num_blocks - 1, device)
        self._rows: dict[str, _Row] = {}
        self._unread: deque[_Step] = deque()
        self._staging = Staging(device)
        self._graphs = DecodeGraphs(program, ops, kv_cache, self._entries, max_num_seqs, max_model_len, device)
        self._verify_graphs = VerifyGraphs(program, ops, kv_cache, self._entries, self._graphs, max_model_len, device)

    @property
    def drafters(self) -> Drafters | None:
        return self._drafters

    # ── start-up ─────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def run_worst_case(self) -> None:
        """The largest steps there can be, once, before anybody waits: they must fit, and first calls are slow."""
        self._try(self._max_num_seqs, self._max_num_batched_tokens)
        if self._max_num_logits_rows > self._max_num_seqs:
            plan = worst_drafts(self._max_num_seqs, self._max_num_logits_rows, self._capacity, self._block_size)
            self.execute(plan)
            self.remove([new.request_id for new in plan.new_requests])

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Steps of sizes for which kernels are compiled anew: that takes seconds, which no request should."""
        for num_tokens in WARM_UP_TOKENS:
            for num_requests in (1, 2):
                if num_requests <= self._max_num_seqs and num_tokens * num_requests <= self._max_num_batched_tokens:
                    self._try(num_requests, num_tokens * num_requests)

    def _try(self, num_requests: int, num_tokens: int) -> None:
        plan = worst_case(num_requests, num_tokens, self._capacity, self._block_size)
        self.execute(plan)
        self.remove([new.request_id for new in plan.new_requests])

    @property
    def _capacity(self) -> int:
        """Tokens of the longest request there can be"""
        return min(self._max_model_len, (self._kv_cache.num_blocks - 1) * self._block_size)

    @torch.inference_mode()
    def capture(self, buckets: Sequence[int] | None = None) -> None:
        """CUDA graphs of decode steps of so many rows; by default of all the sizes that are worth one."""
        self._graphs.capture(decode_buckets(self._max_num_seqs) if buckets is None else buckets)

    @torch.inference_mode()
    def capture_verifying(self, sizes: Sequence[Size], *, graphs: bool = True) -> None:
        """The same of steps that verify drafts, afterwards."""
        self._verify_graphs.capture(sizes, graphs=graphs)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def execute(self, plan: SchedulerOutput) -> StepOutput:
        return self.submit(plan)()

    @torch.inference_mode()
    def submit(self, plan: SchedulerOutput) -> Callable[[], StepOutput]:
        self._apply(plan)
        counts = plan.num_scheduled_tokens
        rows = [self._rows[request_id] for request_id in counts]
        sampled: list[_Sampled] = []
        wanted: list[int] = []
        """Rows of the batch's tokens that are sampled after, in the order of `sampled`"""
        in_prompts: list[int] = []
        """Of those after which the prompt's next token is judged"""
        last = -1
        for (request_id, count), row in zip(counts.items(), rows, strict=True):
            in_prompts += range(last + 1, last + 1 + plan.num_prompt_logprobs.get(request_id, 0))
            last += count
            if row.held.num_computed_tokens + count == row.num_planned_tokens + len(row.drafts):
                one = _Sampled(request_id, row, len(wanted))
                wanted += range(last + 1 - one.num_tokens, last + 1)
                row.num_planned_tokens += one.num_tokens
                sampled.append(one)
        if not plan.new_requests and all(count == 1 for count in counts.values()):
            logits, token_ids = self._decode(plan, rows)
            places = wanted
        elif not plan.new_requests and (size := self._verify_graphs.find(len(rows), last + 1, max(counts.values()))):
            logits, token_ids = self._verify(plan, rows, size)
            places = wanted
        else:
            logits, token_ids = self._ragged(plan, rows, sampled, wanted, in_prompts)
            places = list(range(len(wanted)))
            in_prompts = list(range(len(wanted), len(wanted) + len(in_prompts)))
        for one in sampled:
            one.place = places[one.place]
        # Copied before the next step may overwrite it, and before the host's sampler waits for anything.
        write = None
        if in_prompts:
            parts = [self._rows[name].held.prompt_part(name, count) for name, count in plan.num_prompt_logprobs.items()]
            write = prompt_logprobs(logits[in_prompts], parts)
        step = _Step(plan, sampled, self._staging.read_later(token_ids), self._draft, write)
        self._sample_by_host(step, logits)
        self._unread.append(step)
        return lambda: self._read(step)

    def _read(self, step: _Step) -> StepOutput:
        while step.output is None:
            self._unread.popleft().read()
        return step.read()

    def _decode(self, plan: SchedulerOutput, rows: list[_Row]) -> tuple[torch.Tensor, torch.Tensor]:
        if any(
            cached.new_block_ids and cached.new_block_ids != [row.new_block]
            for row, cached in zip(rows, plan.cached_requests, strict=True)
        ):  # for a drafter to write ahead into
            self._add_blocks(plan, rows)
        count = len(rows)
        size = self._graphs.padded(count)
        with self._staging.write(4 * size) as buffer:
            inputs = buffer.reshape(4, size)
            inputs[:, count:] = ((self._entries.padding,), (0,), (1,), (UNKNOWN,))
            inputs[0, :count] = [row.entry for row in rows]
            inputs[1, :count] = [self._token(row) for row in rows]
            inputs[2, :count] = [row.held.num_computed_tokens + 1 for row in rows]
            inputs[3, :count] = [row.new_block for row in rows]
        self._staging.copy_to(self._graphs.inputs(size))
        return self._graphs.run(size)

    def _token(self, row: _Row) -> int:
        held = row.held
        start = held.num_computed_tokens
        return int(held.tokens(start, start + 1)[0]) if start < held.num_tokens else UNKNOWN

    def _verify(self, plan: SchedulerOutput, rows: list[_Row], size: Size) -> tuple[torch.Tensor, torch.Tensor]:
        """In one graph: rows of few tokens, none of them new. Logits and tokens are those after each of the tokens."""
        counts = list(plan.num_scheduled_tokens.values())
        block_size = self._block_size
        tokens: list[_Ints] = []
        spans, slots = [], []
        for row, count in zip(rows, counts, strict=True):
            held, start = row.held, row.held.num_computed_tokens
            span = np.arange(start, start + count, dtype=np.int64)
            known = held.tokens(start, min(start + count, held.num_tokens))
            tokens += [known, np.array(row.drafts if len(known) else [UNKNOWN], dtype=np.int64)]
            spans.append(span)
            slots.append(held.block_ids[span // block_size] * block_size + span % block_size)
        entries = np.array([row.entry for row in rows])
        positions = np.concatenate(spans)
        self._add_blocks(plan, rows)
        target = self._verify_graphs.inputs(size)
        with self._staging.write(target.shape[0]) as buffer:
            self._verify_graphs.fill(
                buffer,
                size,
                np.stack([np.concatenate(tokens), positions, np.concatenate(slots), np.repeat(entries, counts)]),
                np.stack([entries, positions[np.cumsum(counts) - 1] + 1]),
                counts,
            )
        self._staging.copy_to(target)
        return self._verify_graphs.run(size)

    def _add_blocks(self, plan: SchedulerOutput, rows: list[_Row]) -> None:
        """The device's block tables get the blocks that a plan gives."""
        where: list[tuple[int, int, int]] = []
        for row, cached in zip(rows, plan.cached_requests, strict=True):
            first = len(row.held.block_ids) - len(cached.new_block_ids)
            where += [(row.entry, first + i, block) for i, block in enumerate(cached.new_block_ids)]
        if where:
            (parts,) = self._staging.send(np.array(where, dtype=np.int64).T)
            entries, columns, blocks = parts
            self._entries.block_table[entries, columns] = blocks.int()

    def _ragged(
        self,
        plan: SchedulerOutput,
        rows: list[_Row],
        sampled: list[_Sampled],
        wanted: list[int],
        in_prompts: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One launch after the other. Logits and tokens are those after the `wanted` tokens of the batch; behind them
        logits, and no tokens, of `in_prompts`."""
        counts = list(plan.num_scheduled_tokens.values())
        block_size = self._block_size
        ends = np.cumsum(counts)
        seq_lens = np.array([row.held.num_computed_tokens + c for row, c in zip(rows, counts, strict=True)])
        spans, tokens, slots, unknown = [], [], [], []
        width = max(len(row.held.block_ids) for row in rows)
        table = np.zeros((len(rows), width), dtype=np.int64)
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            start = row.held.num_computed_tokens
            span = np.arange(start, start + count, dtype=np.int64)
            block_ids = row.held.block_ids
            table[index, : len(block_ids)] = block_ids
            spans.append(span)
            slots.append(block_ids[span // block_size] * block_size + span % block_size)
            if row.drafts:
                tokens += [row.held.tokens(start, start + count - len(row.drafts)), np.array(row.drafts)]
            elif start < row.held.num_tokens:
                tokens.append(row.held.tokens(start, start + count))
            else:
                tokens.append(np.zeros(1, dtype=np.int64))
                unknown.append((ends[index] - 1, row.entry))
        entries = np.array([row.entry for row in rows])
        added = [self._rows[new.request_id] for new in plan.new_requests]
        places_in_batch = np.array(wanted, dtype=np.int64)
        repeats = [one.num_tokens for one in sampled]
        parts = self._staging.send(
            np.concatenate(tokens),
            np.concatenate(spans),
            np.concatenate(slots),
            table,
            np.concatenate([[0], ends]),
            seq_lens,
            entries,
            np.concatenate([places_in_batch, np.array(in_prompts, dtype=np.int64)]),
            np.repeat(np.array([one.row.entry for one in sampled], dtype=np.int64), repeats),
            np.concatenate(spans)[places_in_batch] + 1,
            np.array(unknown, dtype=np.int64).reshape(-1, 2).T,
            np.array([row.entry for row in added], dtype=np.int64),
            pack_parameters([row.held.row for row in added]) if added else np.zeros((6, 0), dtype=np.int64),
        )
        token_ids, positions, slot_mapping, blocks, starts, lengths, places, ends_at, who, how_long = parts[:10]
        (where, whose), new_entries, parameters = parts[10:]
        if unknown:
            token_ids.index_copy_(0, where, self._entries.last_token_ids[whose])
        if added:
            self._entries.set_parameters(new_entries, parameters)
        blocks = blocks.int()
        self._entries.block_table[:, :width].index_copy_(0, places, blocks)
        batch: Any = DeviceBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            block_table=blocks,
            query_start_loc=starts.int(),
            seq_lens=lengths.int(),
            logits_rows=ends_at,
            max_query_len=max(counts),
            max_seq_len=int(seq_lens.max()),
        )
        logits = run(self._program, self._ops, batch, self._kv_cache)
        return logits, self._graphs.sample(logits[: len(wanted)], who, how_long.int())

    def _sample_by_host(self, step: _Step, logits: torch.Tensor) -> None:
        by_host = [
            one
            for one in step.sampled
            if (one.drafts and self._verify_method != "coupled")
            or batched.needs_host(
                one.row.held.row, one.row.num_planned_tokens - one.num_tokens - len(one.row.held.prompt_token_ids)
            )
        ]
        if not by_host:
            return
        while self._unread:
            self._unread.popleft().read()
        rows = []
        for one in by_host:
            held = one.row.held
            probs, held.draft_probs = held.draft_probs, None
            rows.append(VerifyRow(held.row, one.drafts, None if probs is None else probs[: len(one.drafts)]))
        places = [place for one in by_host for place in range(one.place, one.place + one.num_tokens)]
        for one, tokens in zip(by_host, verify(logits[places], rows, self._verify_method), strict=True):
            one.by_host = tokens
        (entries, token_ids) = self._staging.send(
            np.array([one.row.entry for one in by_host]),
            np.array([max(0, one.by_host[-1].token_id) for one in by_host if one.by_host]),
        )
        self._entries.last_token_ids.index_copy_(0, entries, token_ids)

    def _draft(self, step: _Step, output: StepOutput) -> None:
        """At the end of a step that has been read. Rows that left since are not drafted for, nor are others that have
        come under their names."""
        if self._drafters is None:
            return
        proposals = step.plan.proposals
        rows = {
            one.request_id: one.row
            for one in step.sampled
            if one.request_id in proposals
            and one.request_id in output.sampled_token_ids
            and self._rows.get(one.request_id) is one.row
        }
        wanted = {name: proposals[name] for name in rows}
        asked = {name: row.held.proposal_row(name, wanted[name].max_tokens) for name, row in rows.items()}
        answer = self._drafters.propose(wanted, asked)
        output.draftings = answer.draftings
        for request_id, (name, proposal) in answer.proposals.items():
            rows[request_id].held.draft_probs = proposal.probs
            output.drafts[request_id] = as_draft(name, proposal)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _apply(self, plan: SchedulerOutput) -> None:
        if self._drafters is not None:
            self._drafters.leave(plan)
        self.remove(plan.removed_request_ids)
        for new in plan.new_requests:
            if new.request_id in self._rows:
                raise RuntimeError(f"the plan adds {new.request_id!r}, which the runner holds already")
            self._rows[new.request_id] = _Row(HeldRequest(new, self._grammars), self._entries.take())
        for cached in plan.cached_requests:
            row = self._rows[cached.request_id]
            row.held.update(cached)
            last = row.held.num_computed_tokens // self._block_size
            fresh = last >= len(row.held.block_ids) - len(cached.new_block_ids)
            row.new_block = int(row.held.block_ids[last]) if fresh else UNKNOWN
        for request_id in plan.num_scheduled_tokens:
            self._rows[request_id].drafts = plan.draft_token_ids.get(request_id, [])

    def remove(self, request_ids: Sequence[str]) -> None:
        """Requests that left, or that no scheduler planned."""
        for request_id in request_ids:
            row = self._rows.pop(request_id, None)
            if row is not None:
                self._entries.give_back(row.entry)
