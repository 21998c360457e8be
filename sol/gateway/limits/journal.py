"""Records on their way to a database, in files of this machine: one write to a file each, so that nothing is lost when
this process is killed, when the database is away, or when both happen at once.

A process appends to a file of its own, which it holds locked. Files without an owner are adopted by whoever finds them.
Nothing is synced to the disk: a crash of the machine, unlike one of the process, may cost the last seconds.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from sol.errors import ConfigError

logger = logging.getLogger("sol.gateway.usage")

_SUFFIX = ".jsonl"


class Segment:
    """One file, locked while this object is open."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def append(self, line: bytes) -> None:
        """Raises OSError; then nothing of the line counts."""
        # The line break comes first: what a full disk or a kill leaves of a line then spoils no other.
        data = b"\n" + line
        written = os.write(self._descriptor, data)
        self.size += written
        if written < len(data):
            raise OSError(errno.ENOSPC, "no space left", str(self.path))

    def lines(self, at_once: int) -> Iterator[list[bytes]]:
        chunk: list[bytes] = []
        with self.path.open("rb") as file:
            for line in file:
                line = line.strip()
                if line:
                    chunk.append(line)
                    if len(chunk) == at_once:
                        yield chunk
                        chunk = []
        if chunk:
            yield chunk

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Somebody else may adopt it from now on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Journal:
    """Files in `directory`. Raises `ConfigError` if it cannot be written."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._current: Segment | None = None
        self.closed: list[Segment] = []
        """Full ones, oldest first; whoever has stored what they hold removes them from here and from the disk."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            probe = self._create()
            probe.remove()
        except OSError as error:
            raise ConfigError(
                f"database.journal: {directory} cannot be written ({error.strerror}); name a directory that can be",
                param="database.journal",
            ) from None

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.closed) + (self._current.size if self._current else 0)

    @property
    def pending(self) -> bool:
        return bool(self.closed) or (self._current is not None and self._current.size > 0)

    def append(self, line: bytes) -> None:
        """Raises OSError where the disk or the journal's share of it is full."""
        if self.size + len(line) > self._max_bytes:
            raise OSError(
                errno.ENOSPC, f"the journal holds {self._max_bytes} bytes, which is its limit", str(self._directory)
            )
        if self._current is None:
            self._current = self._create()
        self._current.append(line)

    def rotate(self) -> None:
        """What was written so far is `closed`."""
        if self._current is not None and self._current.size:
            self.closed.append(self._current)
            self._current = None

    def adopt(self) -> int:
        """Take over files whose owners are gone. Returns how many there were."""
        mine = {segment.path for segment in self.closed}
        if self._current is not None:
            mine.add(self._current.path)
        found = 0
        for path in sorted(self._directory.glob(f"*{_SUFFIX}")):
            if path in mine:
                continue
            try:
                segment = _lock(path, os.O_RDWR | os.O_APPEND)
            except OSError:
                continue
            if segment is None:
                continue
            if segment.size:
                self.closed.append(segment)
                found += 1
            else:
                segment.remove()
        return found

    def close(self) -> None:
        for segment in [*self.closed, *([self._current] if self._current else [])]:
            if segment.size:
                segment.close()
            else:
                segment.remove()
        self.closed = []
        self._current = None

    def _create(self) -> Segment:
        while True:
            path = self._directory / f"{os.getpid()}-{uuid.uuid4().hex}{_SUFFIX}"
            segment = _lock(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL)
            if segment is not None:
                return segment


def _lock(path: Path, flags: int) -> Segment | None:
    """None if somebody has it, or had it and removed it meanwhile."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return Segment(path, descriptor)
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
