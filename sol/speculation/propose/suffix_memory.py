"""Past outputs, by tenant: what they may be continued from later, within a budget."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

from sol.speculation.propose.suffix_index import SEPARATOR, NgramIndex
from sol.speculation.propose.suffix_match import ORDERS
from sol.speculation.propose.suffix_scores import TrackRecord

OUTPUT_OVERHEAD: Final = 64
"""An output is charged so many tokens more than it has: for its separator and bookkeeping, and for the empty tables of
a tenant that has no other, so that many tenants of one short output each are bounded as well."""
_LEAST_DROPPED: Final = 1024


class TenantMemory:
    """The outputs of one tenant in one index, with a separator behind each."""

    __slots__ = ("_dropped", "_lengths", "index", "record")

    def __init__(self) -> None:
        self.index = NgramIndex(ORDERS)
        self.record = TrackRecord()
        self._lengths: deque[int] = deque()
        self._dropped = 0
        """So many tokens at the front of the index are overwritten and wait for being cut off."""

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, output: Sequence[int]) -> None:
        self.index.extend([*output, SEPARATOR])
        self._lengths.append(len(output))

    def drop_oldest(self) -> int:
        """→ the number of its tokens. They are overwritten at once; the index is rebuilt when half of it is such
        tokens, so that a token costs O(1) all in all."""
        length = self._lengths.popleft()
        end = self._dropped + length + 1
        # A place that still points here matches nothing any more: whoever finds it compares tokens.
        self.index.tokens[self._dropped : end] = array("i", [SEPARATOR]) * (length + 1)
        self._dropped = end
        if end >= _LEAST_DROPPED and 2 * end >= len(self.index):
            self.index.drop_front(end)
            self._dropped = 0
        return length


class OutputMemory:
    """Bounded: `max_requests` outputs and `max_tenant_tokens` tokens a tenant, `max_tokens` over all tenants (each
    output charged `OUTPUT_OVERHEAD` more). The oldest go first, those of the tenant where its own bounds are passed.

    A token takes 20 to 28 bytes, up to twice that until what was dropped is cut off. A tenant that reaches its bound
    costs about 10 ms then, once in so many tokens as half the bound.
    """

    def __init__(self, *, max_requests: int, max_tenant_tokens: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tenant_tokens = min(max_tenant_tokens, max_tokens)
        self._max_tokens = max_tokens
        self._tenants: dict[str, TenantMemory] = {}
        self._charged: dict[str, int] = {}
        self._order: OrderedDict[int, str] = OrderedDict()
        self._of_tenant: dict[str, deque[int]] = {}
        self._next = 0
        self.num_tokens = 0
        """Charged, over all tenants"""

    def __len__(self) -> int:
        """Outputs, over all tenants."""
        return len(self._order)

    @property
    def num_bytes(self) -> int:
        return sum(memory.index.num_bytes for memory in self._tenants.values())

    def tenant_tokens(self, tenant: str) -> int:
        """Charged to this tenant."""
        return self._charged.get(tenant, 0)

    def of(self, tenant: str) -> TenantMemory | None:
        return self._tenants.get(tenant)

    def remember(self, tenant: str, output: Sequence[int]) -> None:
        """The end of an output that is longer than the bounds allow."""
        room = self._max_tenant_tokens - OUTPUT_OVERHEAD
        if self._max_requests <= 0 or room <= 0 or not output:
            return
        output = output[-room:]
        charge = len(output) + OUTPUT_OVERHEAD
        while tenant in self._tenants and (
            len(self._tenants[tenant]) >= self._max_requests or self._charged[tenant] + charge > self._max_tenant_tokens
        ):
            self._drop(self._of_tenant[tenant][0])
        while self.num_tokens + charge > self._max_tokens:
            self._drop(next(iter(self._order)))
        if tenant not in self._tenants:
            self._tenants[tenant], self._charged[tenant], self._of_tenant[tenant] = TenantMemory(), 0, deque()
        # Entered first, so that an output that runs out of memory half-way is charged, and goes with its tenant.
        self._charged[tenant] += charge
        self.num_tokens += charge
        self._of_tenant[tenant].append(self._next)
        self._order[self._next] = tenant
        self._next += 1
        try:
            self._tenants[tenant].add(output)
        except BaseException:
            self.drop_tenant(tenant)
            raise

    def drop_tenant(self, tenant: str) -> None:
        """All its outputs; none if it is unknown."""
        if tenant in self._tenants:
            for number in self._of_tenant.pop(tenant):
                del self._order[number]
            self.num_tokens -= self._charged.pop(tenant)
            del self._tenants[tenant]

    def _drop(self, number: int) -> None:
        tenant = self._order[number]
        if len(self._of_tenant[tenant]) == 1:
            self.drop_tenant(tenant)
            return
        del self._order[number]
        self._of_tenant[tenant].popleft()
        charge = self._tenants[tenant].drop_oldest() + OUTPUT_OVERHEAD
        self._charged[tenant] -= charge
        self.num_tokens -= charge
