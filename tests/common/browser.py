# SPDX-License-Identifier: Apache-2.0
"""Look at a page in a browser without a window, as a reader would: pointer, keys, and what the page then shows.

The browser is Debian's chromium-headless-shell, told what to do over two pipes in its DevTools protocol: JSON messages
that end in a zero byte. Tests that use it are skipped where it is not installed.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(
    PROGRAM is None, reason="no browser: apt-get install chromium-headless-shell runs the tests of pages"
)
PATIENCE = 120  # seconds, after which a test fails rather than hang
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")


class Browser:
    """A browser with one page; `problems` are errors and messages of its console."""

    def __init__(self, home, size=(1200, 700)):
        self.problems, self.count, self.rest = list[str](), 0, b""
        (theirs, self.out), (self.into, back) = os.pipe(), os.pipe()
        ends = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (theirs, back)]  # apart from 3 and 4, which it reads
        words = [str(PROGRAM), *FLAGS, f"--user-data-dir={home}", f"--window-size={size[0]},{size[1]}", "about:blank"]
        script = f'exec "$0" "$@" 3<&{ends[0]} 4>&{ends[1]}'
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(["bash", "-c", script, *words], pass_fds=ends, **quiet)
        for one in (theirs, back, *ends):
            os.close(one)
        self.session = None
        target = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self):
        """End it."""
        self.process.kill()
        self.process.wait()
        for one in (self.out, self.into):
            os.close(one)

    def call(self, method, **parameters):
        """Call a method of the protocol, and return its result."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        data = json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0"
        while data:
            data = data[os.write(self.out, data) :]
        while True:
            answer = self.read()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def read(self):
        """Return the next message; note what is wrong."""
        while b"\0" not in self.rest:
            assert select.select([self.into], [], [], PATIENCE)[0], "the browser does not answer"
            some = os.read(self.into, 2**20)
            assert some, "the browser ended"
            self.rest += some
        text, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(text)
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.problems.append(json.dumps(message["params"]))
        return message

    def open(self, document, path, fragment=""):
        """Show a document, which is written to `path`, and wait until it is there."""
        Path(path).write_text(document, encoding="utf-8")
        self.call("Page.navigate", url="about:blank")  # another fragment of the same page would not load it again
        self.call("Page.navigate", url=f"file://{path}{fragment}")
        while self.ask("location.protocol + document.readyState") != "file:complete":
            pass
        self.settle()

    def ask(self, expression):
        """Return the value of an expression in the page, which may be a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self):
        """Wait until what was asked for is drawn."""
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def pointer(self, kind, place, **more):
        """Move, press or release the pointer at a place, or turn its wheel."""
        button = "left" if more.get("buttons") or kind == "mouseReleased" else "none"
        self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button=button, clickCount=1, **more)
        self.settle()

    def drag(self, start, end):
        """Press the pointer at a place, move it to another in steps, and release it."""
        self.pointer("mouseMoved", start)
        self.pointer("mousePressed", start, buttons=1)
        for part in (0.25, 0.5, 0.75, 1.0):
            place = [one + (other - one) * part for one, other in zip(start, end, strict=True)]
            self.pointer("mouseMoved", place, buttons=1)
        self.pointer("mouseReleased", end)

    def picture(self, path):
        """Write a picture of the page."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        Path(path).write_bytes(base64.b64decode(data))
