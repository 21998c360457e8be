"""How the hub is asked: which revision, with which token, or not at all."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final

_VARIABLES: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Where huggingface_hub looks first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAccess:
    revision: str | None = None
    """A branch, a tag or a commit; None: the repository's main branch."""
    token: str | None = field(default=None, repr=False)
    """None: the one that huggingface_hub finds (`HF_TOKEN`, or the file that `hf auth login` writes)."""
    offline: bool = False
    """Only what is in the cache; `HF_HUB_OFFLINE` says the same."""


def is_offline(access: HubAccess) -> bool:
    from huggingface_hub import constants

    return access.offline or constants.HF_HUB_OFFLINE


def token_to_send(access: HubAccess) -> tuple[str | None, str]:
    """The token, and in words where it is from; the words never hold the token."""
    from huggingface_hub import constants, get_token

    if access.token is not None:
        return access.token, "the token of --hf-token"
    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None, "no token (HF_HUB_DISABLE_IMPLICIT_TOKEN is set)"
    token = get_token()
    if token is None:
        return None, "no token"
    for name in _VARIABLES:
        if os.environ.get(name, "").strip() == token:
            return token, f"the token of {name}"
    return token, f"the token in {constants.HF_TOKEN_PATH}"
