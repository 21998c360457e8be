"""Large files of the hub, fetched so that what is there already is never fetched twice.

huggingface_hub throws a file away that it could not finish, and compares sizes only. Here a file grows under a name of
its own in the hub's cache, is gone on with after whatever interrupted it, and becomes one of the cache's blobs, from
which huggingface_hub makes its snapshots, once its SHA-256 is right. Files that the hub stores by content (Xet) are
left to huggingface_hub, whose protocol checks and resumes by pieces.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlsplit

from sol.models.hub_errors import ChecksumError

logger = logging.getLogger("sol.models.hub")

_PARTIAL: Final = ".sol-partial"
_CHUNK: Final = 1 << 20
_NO_LOCKS: Final = frozenset((errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL))


def fetch_blobs(repo: str, commit: str, pattern: str, ignored: Sequence[str], token: str | None, storage: Path) -> None:
    """Brings the large files of a commit that match `pattern` and none of `ignored` into `storage`, the repository's
    directory in the cache. Other processes may do the same at the same time: each file is fetched by one of them.

    Raises what huggingface_hub raises, `OSError`, or `ChecksumError`.
    """
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined, unused-ignore]

    token_or_none = False if token is None else token
    info = HfApi(token=token_or_none).model_info(repo, revision=commit, files_metadata=True)
    for file in info.siblings or ():
        name, lfs = file.rfilename, file.lfs
        if lfs is None or not fnmatch.fnmatch(name, pattern) or any(fnmatch.fnmatch(name, other) for other in ignored):
            continue
        if (storage / "snapshots" / commit / name).exists():
            continue
        url = hf_hub_url(repo, name, revision=commit)
        metadata = get_hf_file_metadata(url, token=token_or_none)
        # Its name in the cache, where huggingface_hub will look for it.
        blob = storage / "blobs" / str(metadata.etag)
        if metadata.etag != lfs.sha256 or metadata.size is None or _is_stored_by_content(metadata) or blob.exists():
            continue
        headers = build_hf_headers(token=token_or_none)
        if urlsplit(metadata.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # a signed address elsewhere, whose owner must not see the token
        _fetch_blob(blob, metadata.location, headers, metadata.size, lfs.sha256, name)


def _is_stored_by_content(metadata: Any) -> bool:
    from huggingface_hub import constants

    if getattr(metadata, "xet_file_data", None) is None or getattr(constants, "HF_HUB_DISABLE_XET", False):
        return False
    try:
        import hf_xet  # type: ignore[import-untyped, unused-ignore]  # noqa: F401
    except ImportError:
        return False
    return True


def _fetch_blob(blob: Path, url: str, headers: dict[str, Any], size: int, sha256: str, name: str) -> None:
    from huggingface_hub.file_download import http_get

    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(blob.name + _PARTIAL)
    while True:
        with partial.open("ab") as file:
            if not _locked(file, name):
                return  # huggingface_hub does it then, from the beginning
            if blob.exists():  # another process has brought it while this one waited
                partial.unlink(missing_ok=True)
                return
            if not _is_at(file, partial):  # another process has moved or removed what this one opened
                continue
            done = file.seek(0, os.SEEK_END)
            if done > size:
                done = file.truncate(0)
            if done:
                logger.info("%s: going on after %.0f of %.0f MB", name, done / 1e6, size / 1e6)
            try:
                http_get(url, file, resume_size=done, headers=headers, expected_size=size, displayed_filename=name)
            except Exception as error:
                if getattr(getattr(error, "response", None), "status_code", None) == 416:
                    file.truncate(0)  # what is there cannot be gone on from
                raise
            file.flush()
            found = _sha256(partial)
            if found != sha256:
                partial.unlink(missing_ok=True)
                raise ChecksumError(f"{name} was fetched with the SHA-256 {found}, the hub says {sha256}")
            os.replace(partial, blob)
            return


def _locked(file: IO[bytes], name: str) -> bool:
    """False where the file system has no locks."""
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("Waiting for another process that is fetching %s", name)
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
