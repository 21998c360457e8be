"""Who asks: API keys, found by their hash."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from sol.errors import AuthenticationError, ConfigError
from sol.gateway.call import Call, Outcome, Principal
from sol.gateway.errors import AccessDeniedError

if TYPE_CHECKING:
    from sol.gateway.config import KeyEntry

ANONYMOUS = Principal(key_id="anonymous", tenant="default")
"""Everybody, where the configuration has no keys."""

_ID_DIGITS = 12


class KeySource(Protocol):
    """Where keys are found, beside the configuration: a database."""

    async def find(self, key_sha256: str) -> Principal | None:
        """None: there is no such key. Raises a SolError where this cannot be known now: a source that is away must
        not turn good keys into bad ones."""
        ...


class Authenticator:
    """Raises `ConfigError` for keys that cannot be read. Without keys and sources everybody is `ANONYMOUS`."""

    def __init__(self, keys: Sequence[KeyEntry], sources: Sequence[KeySource] = ()) -> None:
        self._known: dict[str, Principal] = {}
        self._sources = tuple(sources)
        for index, entry in enumerate(keys):
            digest = _digest_of(entry, f"keys[{index}]")
            if digest in self._known:
                raise ConfigError(f"keys[{index}] is the same key as an earlier one; remove one", param="keys")
            self._known[digest] = _principal(entry, digest)

    async def authenticate(self, headers: Mapping[str, str]) -> Principal:
        """`headers` by lower-case names. Raises `AuthenticationError`, or what a source raises."""
        if not self._known and not self._sources:
            return ANONYMOUS
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationError("no API key: send the header 'Authorization: Bearer KEY'")
        # A hash of what was sent is looked up: how long that takes tells nothing about keys that exist.
        digest = hash_key(key)
        found = self._known.get(digest)
        for source in self._sources:
            if found is None:
                found = await source.find(digest)
        if found is None:
            raise AuthenticationError("unknown API key: send the header 'Authorization: Bearer KEY' with one that is")
        return found


class AuthenticateStage:
    """Sets `call.principal`; refuses models that it may not use."""

    name = "authenticate"

    def __init__(self, authenticator: Authenticator, canonical: Mapping[str, str]) -> None:
        """`canonical`: of each name or alias of a model, its name."""
        self._authenticator = authenticator
        self._canonical = canonical

    async def enter(self, call: Call) -> None:
        call.principal = principal = await self._authenticator.authenticate(call.headers)
        if principal.default_class is not None:
            call.class_name = principal.default_class
        model = self._canonical.get(call.model, call.model)
        if principal.models is not None and model not in principal.models:
            raise AccessDeniedError(f"this key may not use the model {call.model!r:.200}", param="model")

    async def leave(self, call: Call, outcome: Outcome) -> None:
        pass


def hash_key(key: str) -> str:
    """As `key_sha256` in the configuration. A key is long and random, so a plain hash is as good as a slow one."""
    return hashlib.sha256(key.encode()).hexdigest()


def _digest_of(entry: KeyEntry, place: str) -> str:
    if entry.key_sha256 is not None:
        return entry.key_sha256.lower()
    key = entry.key if entry.key is not None else os.environ.get(entry.key_env or "", "")
    if not key:
        where = f"the environment has no variable {entry.key_env}, or it is empty; set it" if entry.key_env else "empty"
        raise ConfigError(f"{place}: {where}", param="keys")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{place}: a key must be printable ASCII without spaces: it travels in an HTTP header",
                          param="keys")  # fmt: skip
    return hash_key(key)


def _principal(entry: KeyEntry, digest: str) -> Principal:
    return Principal(
        key_id=entry.id or f"sha256:{digest[:_ID_DIGITS]}",
        tenant=entry.tenant,
        models=entry.models,
        classes=entry.classes,
        default_class=entry.default_class,
        limits=entry.limits,
        metadata=entry.metadata,
    )
