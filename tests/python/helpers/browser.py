"""A headless Chromium, driven through its DevTools protocol: https://chromedevtools.github.io/devtools-protocol/.

It is the program that ``CHROMIUM`` names. ``make`` gets one: ``tools/find_tool.py``.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Page", "chromium", "opened"]

LIMIT_S = 60.0
OPTIONS = [
    "--headless",
    "--no-sandbox",  # a container may refuse it, and the test's own pages are all that is opened
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-breakpad",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--remote-debugging-pipe",
    "--window-size=1200,1600",
]


def chromium() -> str:
    """Return the program, or skip the test."""
    if not (named := os.environ.get("CHROMIUM")):
        pytest.skip("CHROMIUM names no Chromium; `make` gets one: tools/find_tool.py")
    found = shutil.which(named)
    assert found, f"CHROMIUM is `{named}`, which is no program"
    return found


class Page:
    """An open page of a browser."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._last = 0
        self.events: list[dict[str, Any]] = []
        """What the browser has reported so far."""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Call a method, and return its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._last:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def until(self, method: str, *, since: int = 0) -> dict[str, Any]:
        """Wait for an event that was not among the first ``since`` ones, and return its parameters."""
        at = since
        while True:
            for event in self.events[at:]:
                at += 1
                if event["method"] == method:
                    return dict(event["params"])
            self.events.append(self._read())

    def open(self, url: str) -> None:
        """Open an address, and wait until it is loaded."""
        since = len(self.events)
        self.call("Page.navigate", url=url)
        self.until("Page.loadEventFired", since=since)

    def value(self, expression: str) -> Any:
        """Evaluate an expression in the page."""
        output = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in output, output
        return output["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        code = {"Enter": 13, " ": 32, "Tab": 9}[key]
        typed = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **typed)
        self.call("Input.dispatchKeyEvent", type="keyUp", **typed)

    def screenshot(self, path: Path) -> None:
        """Write the whole page as an image, for people."""
        output = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(output["data"]))

    def requests(self) -> list[str]:
        """Return the addresses that were asked for."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[str]:
        """Return what the browser has logged, such as what a policy has forbidden."""
        return [event["params"]["entry"]["text"] for event in self.events if event["method"] == "Log.entryAdded"]

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium has said nothing for {LIMIT_S:.0f} s; before: {self.events[-5:]}"
            read = os.read(self._answers, 1 << 16)
            assert read, "Chromium has ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextlib.contextmanager
def opened(folder: Path, env: dict[str, str] | None = None) -> Iterator[Page]:
    """Start a browser whose files are in the folder, and end it with all of its processes."""
    program = chromium()
    (in_read, in_write), (out_read, out_write) = os.pipe(), os.pipe()
    # It reads from descriptor 3 and writes to 4, which may be in use here.
    ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (in_read, out_write)]
    os.close(in_read)
    os.close(out_write)
    nowhere = os.open(os.devnull, os.O_RDWR)
    pid = os.posix_spawn(
        program,
        [program, *OPTIONS, f"--user-data-dir={folder / 'profile'}"],
        {**os.environ, "HOME": str(folder), **(env or {})},
        file_actions=[
            *((os.POSIX_SPAWN_DUP2, nowhere, fd) for fd in range(3)),
            (os.POSIX_SPAWN_DUP2, ends[0], 3),
            (os.POSIX_SPAWN_DUP2, ends[1], 4),
        ],
        setsid=True,
    )
    for fd in (*ends, nowhere):
        os.close(fd)
    try:
        yield Page(in_write, out_read)
    finally:
        os.close(in_write)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(out_read)
