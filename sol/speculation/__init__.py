"""Speculative decoding: `plan` decides (no tensors), `propose` drafts, `verify` keeps what is right.

scheduler ── how many drafts to verify, who proposes next ──▶ runner: forward, verify, propose
scheduler ◀── what was emitted, the next drafts ───────────── runner
"""
