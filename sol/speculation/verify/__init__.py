"""Which drafts stay: exactly the target's own tokens, or exactly its law."""

from sol.speculation.verify.verifier import VerifyRow, verify

__all__ = ["VerifyRow", "verify"]
