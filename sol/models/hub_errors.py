"""What the hub's refusals and failures mean to who wants a model, and what to do about each."""

from __future__ import annotations

import difflib
import email.utils
import errno
import os
import re
import time
from pathlib import Path
from typing import Any, Final

from sol.errors import DownloadError, ModelNotFoundError, SolError
from sol.models.hub_access import HubAccess, is_offline, token_to_send

TRANSIENT_STATUSES: Final = frozenset((408, 425, 429, 500, 502, 503, 504))
_CLIENT_LIBRARIES: Final = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
"""What huggingface_hub has fetched with, from version to version; their exceptions are of broken connections."""
_UNWRITABLE: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM))
_RATE_LIMIT_RESET: Final = re.compile(r"\bt=(\d+)", re.ASCII)
_NUM_CANDIDATES: Final = 100


class ChecksumError(Exception):
    """A file that was fetched is not the one that the hub describes."""


def response_of(error: BaseException) -> Any:
    """The hub's response, which may hide in the cause of "not in the cache"; None if there was none."""
    while True:
        response = getattr(error, "response", None)
        if response is not None or error.__cause__ is None:
            return response
        error = error.__cause__


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed a little later."""
    response = response_of(error)
    if response is not None:
        return response.status_code in TRANSIENT_STATUSES
    if isinstance(error, FileNotFoundError):  # not in the cache, and the hub out of reach: it was tried
        return False
    library = type(error).__module__.partition(".")[0]
    return library in _CLIENT_LIBRARIES or isinstance(error, (ChecksumError, ConnectionError, TimeoutError))


def seconds_to_wait(error: BaseException) -> float | None:
    """What the hub asks for: `retry-after` in either of its forms, or the reset of its `ratelimit` header."""
    response = response_of(error)
    if response is None:
        return None
    given = response.headers.get("retry-after", "").strip()
    if given.isdecimal():
        return float(given)
    if given:
        try:
            return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - time.time())
        except ValueError:
            pass
    reset = _RATE_LIMIT_RESET.search(response.headers.get("ratelimit", ""))
    return float(reset[1]) if reset is not None else None


def explained(error: Exception, repo: str, access: HubAccess) -> SolError:
    """The error that a user is shown. It never holds the token."""
    token, _ = token_to_send(access)
    result = _explained(error, repo, access)
    if token and token in result.message:
        return type(result)(result.message.replace(token, "***"), param=result.param)
    return result


def _explained(error: Exception, repo: str, access: HubAccess) -> SolError:
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return ModelNotFoundError(f"model {repo!r} is neither a path nor a hub id: {error}", param="model")
    if isinstance(error, errors.GatedRepoError):
        return _gated(error, repo, access)
    if isinstance(error, errors.RepositoryNotFoundError):
        return _not_found(repo, access)
    if isinstance(error, errors.RevisionNotFoundError):
        return _no_revision(repo, access)
    if isinstance(error, ChecksumError):
        return DownloadError(
            f"model {repo!r}: {error}; it was removed. Run again; if it happens again, look for a proxy that changes "
            "what it passes on, or for a failing disk or memory",
            param="model",
        )
    response = response_of(error)
    if response is not None:
        return _refused(error, response, repo, access)
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return _not_in_cache(repo, access)
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return _unwritable(error, repo)
    if type(error).__name__.startswith("Connect"):  # to whatever library it belongs
        return _not_in_cache(repo, access)
    return DownloadError(
        f"model {repo!r} could not be fetched: {type(error).__name__}: {error}; run again to go on where it stopped",
        param="model",
    )


def _gated(error: Exception, repo: str, access: HubAccess) -> SolError:
    token, origin = token_to_send(access)
    page = f"https://huggingface.co/{repo}"
    if token is None:
        text = (
            f"model {repo!r} is gated, and {origin} was sent: accept its licence at {page}, then give a token of that "
            "account with HF_TOKEN, --hf-token or `hf auth login` (https://huggingface.co/settings/tokens makes one)"
        )
    else:
        text = (
            f"model {repo!r} is gated, and the account of {origin} may not read it yet: accept its licence at {page} "
            "(some publishers then decide by hand). A fine-grained token also needs the permission to read public "
            "gated repositories"
        )
    return DownloadError(text + _server_message(error), param="model")


def _not_found(repo: str, access: HubAccess) -> SolError:
    token, origin = token_to_send(access)
    text = f"model {repo!r} is neither a path here nor a repository on the hub"
    near = _near_repositories(repo, token)
    if near:
        text += f"; did you mean {' or '.join(near)}?"
    if token is None:
        text += " (if it is private, set HF_TOKEN)"
    else:
        text += f" (if it is private: {origin} cannot see it)"
    return ModelNotFoundError(text, param="model")


def _no_revision(repo: str, access: HubAccess) -> SolError:
    from huggingface_hub import HfApi

    text = f"model {repo!r} has no revision {access.revision!r}"
    try:
        refs = HfApi(token=token_to_send(access)[0] or False).list_repo_refs(repo)
        names = [ref.name for ref in (*refs.branches, *refs.tags)]
    except Exception:
        names = []  # only a hint was looked for
    if names:
        near = difflib.get_close_matches(str(access.revision), names, n=3) or names[:8]
        text += f"; it has {', '.join(near)}"
    return ModelNotFoundError(f"{text}. Give a branch, a tag or a whole commit hash", param="revision")


def _refused(error: Exception, response: Any, repo: str, access: HubAccess) -> SolError:
    status = response.status_code
    token, origin = token_to_send(access)
    if status == 401 and token is not None:
        text = (
            f"the hub refuses {origin} (HTTP 401): it is mistyped, expired or revoked. Make another at "
            "https://huggingface.co/settings/tokens, or remove it: public models need none"
        )
    elif status in (401, 403):
        text = (
            f"the hub refuses model {repo!r} (HTTP {status}) with {origin}: accept its licence at "
            f"https://huggingface.co/{repo} and set HF_TOKEN to a token that may read it"
        )
    elif status == 429:
        seconds = seconds_to_wait(error)
        when = "later" if seconds is None else f"in {seconds:.0f} s"
        text = f"model {repo!r} could not be fetched: the hub answers HTTP 429, too many requests; try again {when}"
        if token is None:
            text += ". It allows more to those with a token: set HF_TOKEN"
    else:
        text = f"model {repo!r} could not be fetched: the hub answers HTTP {status}; try again later"
    return DownloadError(text + _server_message(error), param="model")


def _not_in_cache(repo: str, access: HubAccess) -> SolError:
    text = f"model {repo!r} is not in the hub's cache ({_cache()}), or not completely"
    revision = "" if access.revision is None else f" --revision {access.revision}"
    if is_offline(access):
        text += (
            ", and offline mode is set: leave out --offline and unset HF_HUB_OFFLINE, or fetch it with "
            f"`sol pull {repo}{revision}` on a machine with a network and copy the cache, or give a path"
        )
    else:
        text += ", and the hub cannot be reached: connect this machine (HF_ENDPOINT names a mirror), or give a path"
    return DownloadError(text, param="model")


def _unwritable(error: OSError, repo: str) -> SolError:
    text = f"model {repo!r} could not be written to the hub's cache ({_cache()}): {os.strerror(error.errno or 0)}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        text += "; make room (`hf cache` shows what is there) or set HF_HOME to a larger disk, then run again: what is "
        text += "fetched is kept"
    else:
        text += "; set HF_HOME to a directory that can be written"
    return DownloadError(text, param="model")


def _server_message(error: Exception) -> str:
    message = getattr(error, "server_message", None)
    return f" (the hub says: {' '.join(str(message).split())[:300]})" if message else ""


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _near_repositories(repo: str, token: str | None) -> list[str]:
    """Names on the hub that this one may be a misspelling of: of the same owner, or with the same model's name."""
    from huggingface_hub import HfApi

    owner, _, name = repo.rpartition("/")
    searches: list[dict[str, str]] = [{"search": name}]
    if owner:
        searches.insert(0, {"author": owner})
    found: set[str] = set()
    for search in searches:
        try:
            api = HfApi(token=token or False)
            found |= {model.id for model in api.list_models(limit=_NUM_CANDIDATES, **search)}  # type: ignore[arg-type]
        except Exception:  # noqa: S112 (only a hint was looked for)
            continue
    by_lower = {name.lower(): name for name in found}
    return [by_lower[name] for name in difflib.get_close_matches(repo.lower(), by_lower, n=3, cutoff=0.7)]
