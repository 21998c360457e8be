"""A real browser to try the page in: headless Chromium, driven by its DevTools protocol.

Chromium speaks the protocol over two pipes when it is asked to (JSON, each message ended by a zero byte), so that
nothing but Chromium itself is needed: no driver, no WebSocket library, no port.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "chrome-headless-shell", "google-chrome")
MISSING = "there is no Chromium: on Debian and Ubuntu, apt-get install chromium-headless-shell (or chromium)"

# Chromium reads from descriptor 3 and writes to 4.
_START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_FLAGS = (
    "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--mute-audio", "--hide-scrollbars",
)  # fmt: skip
_SECONDS = 60


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class BrowserError(AssertionError):
    pass


class Browser:
    def __init__(self, profile: Path) -> None:
        program = find_chromium()
        assert program is not None, MISSING
        commands, self._commands = _pipe()
        self._messages, messages = _pipe()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _START,
                str(commands),
                str(messages),
                program,
                *_FLAGS,
                f"--user-data-dir={profile}",
            ],
            pass_fds=(commands, messages),
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(messages)
        self._ids = itertools.count(1)
        self._replies: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command. Raises `BrowserError` for one that fails."""
        number = next(self._ids)
        reply = self._replies[number] = queue.SimpleQueue()
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        answer = reply.get(timeout=_SECONDS)
        if answer is None:
            raise BrowserError("Chromium ended")
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    @contextlib.contextmanager
    def page(self, url: str, *, width: int = 1280, height: int = 800, scheme: str = "light") -> Iterator[Page]:
        """A page in a context of its own: nothing stored by others, nothing left to them."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        try:
            target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
            session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            page = self._pages[session] = Page(self, session)
            page.open(url, width=width, height=height, scheme=scheme)
            yield page
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        with contextlib.suppress(BrowserError, OSError):
            self.call("Browser.close")
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._commands)
        self._reader.join()

    def _read(self) -> None:
        with open(self._messages, "rb") as stream:
            buffer = b""
            while data := os.read(stream.fileno(), 2**20):
                *whole, buffer = (buffer + data).split(b"\0")
                for message in map(json.loads, whole):
                    if "id" in message:
                        self._replies.pop(message["id"]).put(message)
                    elif page := self._pages.get(message.get("sessionId", "")):
                        page.notice(message["method"], message["params"])
        for reply in list(self._replies.values()):
            reply.put(None)


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.requests: list[tuple[str, str]] = []
        """Method and URL of everything that the page asked for."""
        self.complaints: list[str] = []
        """Exceptions, errors and warnings of the console, refusals of the security policy."""

    def notice(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append((params["request"]["method"], params["request"]["url"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def open(self, url: str, *, width: int, height: int, scheme: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.go(url)

    def go(self, url: str) -> None:
        result = self.call("Page.navigate", url=url)
        assert "errorText" not in result, result
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, awaited if it is a promise."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise BrowserError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait_for(self, expression: str, seconds: float = _SECONDS) -> None:
        """Until the expression's value counts as true in JavaScript."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                raise BrowserError(f"still false: {expression}; {self.complaints}; {self.text('body')}")
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """What a person reads there: hidden parts are not in it."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def style(self, selector: str, name: str) -> str:
        query = json.dumps(selector)
        return str(self.evaluate(f"getComputedStyle(document.querySelector({query}))[{json.dumps(name)}]"))

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the element: what lies over it is hit instead."""
        query = json.dumps(selector)
        x, y = self.evaluate(
            f"(node => {{ node.scrollIntoView({{block: 'nearest'}}); const box = node.getBoundingClientRect();"
            f" return [box.x + box.width / 2, box.y + box.height / 2]; }})(document.querySelector({query}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def write(self, text: str, into: str | None = None) -> None:
        """Into what has the focus, or into an element in place of what it holds."""
        if into is not None:
            self.evaluate(f"(node => {{ node.focus(); node.select(); }})(document.querySelector({json.dumps(into)}))")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39}
        extra = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key],
                **(extra if kind == "keyDown" else {}),
            )  # fmt: skip

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


def _pipe() -> tuple[int, int]:
    """With descriptors above 4, which Chromium's two are made of one after the other."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
