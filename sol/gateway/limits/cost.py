"""What tokens cost, in whole billionths of the currency, so that sums are exact."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_HALF_EVEN, Decimal

from sol.gateway.call import Usage
from sol.gateway.limits.config import Price

NANO = 10**9


def cost_nano(usage: Usage, price: Price | None) -> int:
    """Billionths of the currency that prices are in. A model without a price costs nothing."""
    if price is None:
        return 0
    cached = min(usage.cached_tokens, usage.prompt_tokens)
    cached_price = price.input if price.cached_input is None else price.cached_input
    # A price is of a million tokens, so a token costs a thousand times as many billionths.
    nano = 1000 * (
        (usage.prompt_tokens - cached) * price.input + cached * cached_price + usage.completion_tokens * price.output
    )
    return int(nano.to_integral_value(ROUND_HALF_EVEN))


def as_decimal(nano: int) -> Decimal:
    return Decimal(nano) / NANO


class Totals:
    """Of some calls: what they used and cost."""

    __slots__ = ("cached_tokens", "completion_tokens", "cost_nano", "prompt_tokens", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.cost_nano = 0

    def add(self, usage: Usage, cost: int) -> None:
        self.requests += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens
        self.cost_nano += cost

    def as_dict(self) -> Mapping[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}
