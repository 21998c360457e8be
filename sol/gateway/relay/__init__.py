"""Carries bytes between a client and an engine: `sse` finds whole events and usage in them, `request` makes the body an
engine is sent, `attempt` asks one engine once, `relay` decides what a failed attempt means."""
