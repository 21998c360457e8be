"""A hub on localhost: the routes that huggingface_hub needs to fetch a repository, and the ways in which they fail.

Weights are "large files": their address leads on to another host, as the real hub's do, where they can be had in parts.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.revisions: dict[str, dict[str, str]] = {}
        """Repository → branch or tag → commit; `main` is `COMMIT` where nothing else is said."""
        self.contents: dict[str, dict[str, bytes]] = {}
        """Commit → files, where they differ from the repository's."""
        self.refusals: dict[str, tuple[int, str]] = {}
        """Repository → HTTP status and the hub's error code."""
        self.readers: dict[str, set[str]] = {}
        """Repository → tokens that may read it; others get 401 or 403."""
        self.clear()

    def clear(self) -> None:
        """Forgets what was sent, and all failures that are still to come."""
        self.fetched: list[str] = []
        """Files that were sent, as org/name/file."""
        self.ranges: list[str | None] = []
        """Of each large file that was sent, the range that was asked for."""
        self.tokens: list[tuple[str, str | None]] = []
        """Path and token of each request."""
        self.failures: list[tuple[int, dict[str, str]]] = []
        """Statuses and headers that the next requests are answered with."""
        self.cuts: list[tuple[int, int | None]] = []
        """The next large files break off after so many bytes; then the next request is answered with that status."""
        self.corrupted = 0
        """So many of the next large files arrive with another byte."""
        self.before_sending = threading.Event()
        """Large files are held back until it is set."""
        self.before_sending.set()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def storage(self) -> str:
        """Where large files lie: another host, to those who compare names."""
        return f"http://localhost:{self.server_address[1]}"

    def files_of(self, repo: str, commit: str) -> dict[str, bytes]:
        return self.contents.get(commit, self.repositories[repo])


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", ".bin"))


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True  # the client has gone

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _send(self, status: int, content: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(content)), "X-Repo-Commit": COMMIT} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _send_json(self, value: Any, *, body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body=body)

    def _refuse(self, status: int, code: str, *, body: bool, message: str | None = None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message or code}
        self._send(status, json.dumps({"error": message or code}).encode(), headers, body=body)

    def _answer(self, *, body: bool) -> None:
        url = urlsplit(self.path)
        parts = url.path.strip("/").split("/")
        token = self.headers.get("authorization", "").removeprefix("Bearer ") or None
        with self.server.lock:
            self.server.tokens.append((url.path, token))
            failure = self.server.failures.pop(0) if self.server.failures else None
        if failure is not None:
            return self._send(failure[0], b"{}", failure[1], body=body)
        if parts[0] == "storage":
            return self._send_large("/".join(parts[1:3]), parts[3], "/".join(parts[4:]))
        if token == "unknown":
            return self._refuse(401, "", body=body, message="Invalid credentials in Authorization header")
        if parts == ["api", "models"]:
            return self._search(parse_qs(url.query), body=body)
        is_api = parts[:2] == ["api", "models"]
        repo, rest = ("/".join(parts[2:4]), parts[4:]) if is_api else ("/".join(parts[:2]), parts[2:])
        if repo in self.server.refusals:
            return self._refuse(*self.server.refusals[repo], body=body)
        if repo not in self.server.repositories:
            return self._refuse(401, "RepoNotFound", body=body)
        readers = self.server.readers.get(repo)
        if readers is not None and token not in readers:
            return self._refuse(401 if token is None else 403, "GatedRepo", body=body)
        refs = {"main": COMMIT} | self.server.revisions.get(repo, {})
        if rest[:1] == ["refs"]:
            branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": at} for name, at in refs.items()]
            return self._send_json({"branches": branches, "tags": [], "converts": []}, body=body)
        revision = rest[1] if len(rest) > 1 else "main"
        commit = refs.get(revision, revision)
        if commit not in refs.values():
            return self._refuse(404, "RevisionNotFound", body=body)
        files = self.server.files_of(repo, commit)
        if is_api:
            entries = [self._entry(name, content) for name, content in files.items()]
            if rest[:1] == ["tree"]:
                return self._send_json([{"type": "file", **entry} for entry in entries], body=body)
            siblings = [{"rfilename": entry.pop("path"), "blobId": entry.pop("oid"), **entry} for entry in entries]
            return self._send_json({"id": repo, "sha": commit, "siblings": siblings}, body=body)
        return self._resolve(repo, commit, "/".join(rest[2:]), files, body=body)

    def _entry(self, name: str, content: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        if is_large(name):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "sha256": digest, "size": len(content), "pointerSize": 130}
        return entry

    def _resolve(self, repo: str, commit: str, name: str, files: dict[str, bytes], *, body: bool) -> None:
        if name not in files:
            self._refuse(404, "EntryNotFound", body=body)
            return
        content = files[name]
        if is_large(name):
            headers = {
                "Location": f"{self.server.storage}/storage/{repo}/{commit}/{name}",
                "X-Linked-Size": str(len(content)),
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Repo-Commit": commit,
            }
            self._send(302, b"", headers, body=body)
            return
        if body:
            self.server.fetched.append(f"{repo}/{name}")
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
        self._send(200, content, headers, body=body)

    def _send_large(self, repo: str, commit: str, name: str) -> None:
        content = self.server.files_of(repo, commit)[name]
        self.server.before_sending.wait(60)
        asked = self.headers.get("range")
        with self.server.lock:
            self.server.fetched.append(f"{repo}/{name}")
            self.server.ranges.append(asked)
            cut = self.server.cuts.pop(0) if self.server.cuts else None
            corrupt = self.server.corrupted > 0
            self.server.corrupted -= corrupt
        if corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        begin = 0
        headers = {"Accept-Ranges": "bytes"}
        found = re.fullmatch(r"bytes=(\d+)-", asked or "")
        if found is not None:
            begin = int(found[1])
            if begin >= len(content):
                self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"}, body=True)
                return
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        part = content[begin:]
        if cut is None:
            self._send(206 if found else 200, part, headers, body=True)
            return
        size, status = cut
        if status is not None:
            self.server.failures.append((status, {}))
        self._send(206 if found else 200, part[:size], headers | {"Content-Length": str(len(part))}, body=True)
        self.close_connection = True

    def _search(self, query: dict[str, list[str]], *, body: bool) -> None:
        author, text = query.get("author", [""])[0], query.get("search", [""])[0].lower()
        found = [
            {"id": repo, "modelId": repo}
            for repo in self.server.repositories
            if repo.startswith(f"{author}/" if author else "") and text in repo.lower()
        ]
        self._send_json(found, body=body)


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.before_sending.set()
        hub.shutdown()
        thread.join()
        hub.server_close()
