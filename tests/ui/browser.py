"""A headless Chromium that tests drive by the DevTools protocol, over a pair of pipes.

Pipes (``--remote-debugging-pipe``) need no library and no port, so that the browser can run in a network namespace
of a demo; WebDriver would hide what these tests are about: console messages, violations of the content security
policy, and every request that the page makes. Messages are JSON, each ended by a null byte
(https://chromedevtools.github.io/devtools-protocol/).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: For every wait; slow machines raise it.
WAIT_S = 20.0 * float(os.environ.get("ZTUNNEL_TEST_PATIENCE", "1"))
_POLL_S = 0.05
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
)
#: Puts the pipes where Chromium looks for them: it reads from 3 and writes to 4.
_WITH_PIPES = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

Popen = Callable[..., "subprocess.Popen[Any]"]


def chromium() -> str:
    """Return the path of the browser. Without one the test is skipped with a message."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("NOT TESTED: no chromium here (Debian's package chromium)")
    return found


class Failed(Exception):
    """The browser refused a command, or a script threw."""


class Browser:
    """One page of a browser.

    Attributes:
        problems: console errors, exceptions and whatever the browser logged as an error, in order.
        requests: the address of every request, in order.
    """

    def __init__(self, process: subprocess.Popen[Any], reads: int, writes: int) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._process = process
        self._reads, self._writes = reads, writes
        self._number = 0
        self._unread = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    # The protocol

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result. Events that arrive meanwhile are recorded."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_S
        while True:
            answer = self._message(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise Failed(f"{method}: {answer['error']['message']}")
                result = answer["result"]
                assert isinstance(result, dict)
                return result
            self._note(answer)

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._reads], [], [], left)[0]:
                raise Failed("the browser does not answer")
            data = os.read(self._reads, 1 << 16)
            if not data:
                raise Failed(f"the browser has ended, status {self._process.wait(WAIT_S)}")
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        found = json.loads(message)
        assert isinstance(found, dict)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.problems.append(
                    f"exception: {details.get('exception', {}).get('description', details['text'])}"
                )
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.problems.append(f"console: {[each.get('value') for each in parameters['args']]}")
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                entry = parameters["entry"]
                self.problems.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}".rstrip())
            case "Page.javascriptDialogOpening":
                self.problems.append(f"dialog: {parameters['message']}")

    # The page

    def open(self, url: str) -> None:
        """Load a page; returns when its scripts have run."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page.

        Raises:
            Failed: it threw.
        """
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise Failed(f"{expression}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + WAIT_S
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"never true: {expression}; {self.problems}"
            time.sleep(_POLL_S)

    def text(self, selector: str) -> str:
        """Return the text of an element as it is shown."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def rows(self, table: str) -> list[list[str]]:
        """Return the cells of a table's body, line breaks as spaces."""
        rows = self.evaluate(
            f"[...document.querySelector({json.dumps(table)}).tBodies[0].rows]"
            ".map(row => [...row.cells].map(cell => cell.innerText.replaceAll('\\n', ' ')))"
        )
        assert isinstance(rows, list)
        return rows

    def click(self, selector: str) -> None:
        """Click the middle of an element like a mouse. An element above it gets the click instead."""
        place = self.evaluate(
            f"(() => {{ const each = document.querySelector({json.dumps(selector)});"
            "each.scrollIntoView({block: 'center', inline: 'center'});"
            "const box = each.getBoundingClientRect();"
            "if (!box.width) throw new Error('not shown');"
            "return {x: box.x + box.width / 2, y: box.y + box.height / 2}; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **place, button="left", clickCount=1)

    def show(self, view: str) -> None:
        """Go to a view by its link; returns when it is shown, which is later than the click."""
        self.click(f"nav a[href='#{view}']")
        self.until(f"!document.getElementById('{view}').hidden")

    def type(self, text: str) -> None:
        """Insert text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        """Press and release a key, given by its name and its Windows key code."""
        more = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)

    def unnamed(self) -> list[str]:
        """Return the roles of controls, tables and regions that have no name for a screen reader."""
        tree = self.call("Accessibility.getFullAXTree")["nodes"]
        wanted = {"button", "link", "textbox", "searchbox", "combobox", "table", "navigation", "region", "group"}
        return [
            node["role"]["value"]
            for node in tree
            if not node.get("ignored")
            and node.get("role", {}).get("value") in wanted
            and not node.get("name", {}).get("value", "").strip()
        ]

    def look(self, *, width: int = 1280, height: int = 860, scheme: str = "light") -> None:
        """Set the window's size, and which colours the user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page (PNG)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(popen: Popen = subprocess.Popen) -> Iterator[Browser]:
    """Start a browser with an empty profile. It ends, and the profile is deleted, with the block.

    Args:
        popen: starts its process, in a network namespace for example.
    """
    program = chromium()
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="ztunnel-ui-", ignore_cleanup_errors=True) as profile:
        theirs = (to_browser[0], from_browser[1])
        process = popen(
            [
                *(sys.executable, "-c", _WITH_PIPES, *map(str, theirs)),
                *(program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"),
            ],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
        )
        for end in theirs:
            os.close(end)
        reads, writes = from_browser[0], to_browser[1]
        try:
            yield Browser(process, reads, writes)
        finally:
            os.close(writes)  # the browser ends when its pipe does
            os.close(reads)
            try:
                process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
