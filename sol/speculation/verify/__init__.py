"""Which drafts stay: exactly the target's own tokens, or exactly its law."""
