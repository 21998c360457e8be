"""A hub on localhost: the few routes that huggingface_hub needs to fetch a repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        """Repository → HTTP status and the hub's error code."""
        self.fetched: list[str] = []
        """Files that were sent, as org/name/file."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _send(self, status: int, content: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content)), "X-Repo-Commit": COMMIT}).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _refuse(self, status: int, code: str, *, body: bool) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code}
        self._send(status, json.dumps({"error": code}).encode(), headers, body=body)

    def _answer(self, *, body: bool) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        if repo in self.server.refusals:
            return self._refuse(*self.server.refusals[repo], body=body)
        files = self.server.repositories.get(repo)
        if files is None:
            return self._refuse(401, "RepoNotFound", body=body)
        if is_api and "tree" in parts:
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            return self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, body=body)
        if is_api:
            info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, body=body)
        name = "/".join(parts[4:])
        if name not in files:
            return self._refuse(404, "EntryNotFound", body=body)
        if body:
            self.server.fetched.append(f"{repo}/{name}")
        return self._send(200, files[name], {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"'}, body=body)


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
