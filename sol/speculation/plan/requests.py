"""What a controller remembers of each request."""

from __future__ import annotations

from dataclasses import dataclass

from sol.engine.types import Draft


@dataclass(slots=True)
class Past:
    """A request's with one drafter."""

    gain: float = 0.0
    """Tokens a proposal, of recent ones; empty ones gained nothing"""
    num_gains: float = 0.0
    """That it is the mean of, at most those that count"""
    num_proposals: int = 0
    num_read: int = 0
    """Tokens of the request that the drafter has seen"""
    wait: int = 1
    """Steps until it is tried again, if it was tried now"""
    next_probe: int = 0


@dataclass(slots=True)
class Request:
    pasts: list[Past | None]
    """[drafter]; None for those that may not draft for it"""
    turn: int = 0
    """The step at which somebody thinks about drafting for it again; 0 for every one"""
    asked: int = -1
    """The lookup that was asked after the latest step, -1 for none"""
    slot: int = 0
    """Its place in the `Hand`, which has its habits …"""
    draft: Draft | None = None
    """… and the drafts that were judged there"""
    # While its turn is being planned:
    index: int = 0
    """Among the rows of the plan"""
    num_tokens: int = 0
    """`Drafter.num_tokens`, and …"""
    max_tokens: int = 0
    """… `max_tokens`"""
    lookup: int = -1
    """That is asked for it, -1 for none …"""
    length: int = 0
    """… for so many drafts"""
    model: int = -1
    model_length: int = 0
    net: float = 0.0
    """Tokens that the best of the two is expected to gain"""
