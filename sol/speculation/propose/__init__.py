"""Drafters behind one protocol."""

from typing import Final

from sol.speculation.config import SpeculativeConfig
from sol.speculation.propose.ngram import NgramProposer
from sol.speculation.propose.protocol import Proposal, ProposalRow, Proposer
from sol.speculation.propose.suffix import SuffixProposer

__all__ = ["LOOKUPS", "Proposal", "ProposalRow", "Proposer", "lookup_proposers"]

LOOKUPS: Final = ("ngram", "suffix")
"""The drafters that look tokens up and compute no model."""


def lookup_proposers(config: SpeculativeConfig) -> list[Proposer]:
    """Those of the drafters asked for that need nothing but text."""
    proposers: list[Proposer] = []
    for name in config.drafters:
        if name == "ngram":
            proposers.append(
                NgramProposer(prompt_lookup_min=config.prompt_lookup_min, prompt_lookup_max=config.prompt_lookup_max)
            )
        elif name == "suffix":
            proposers.append(
                SuffixProposer(
                    max_tree_depth=config.suffix_decoding_max_tree_depth,
                    max_cached_requests=config.suffix_decoding_max_cached_requests,
                    max_spec_factor=config.suffix_decoding_max_spec_factor,
                    min_token_prob=config.suffix_decoding_min_token_prob,
                )
            )
    return proposers
