"""Drafters behind one protocol."""

from sol.speculation.propose.protocol import Proposal, ProposalRow, Proposer

__all__ = ["Proposal", "ProposalRow", "Proposer"]
