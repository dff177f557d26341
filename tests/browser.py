"""A page in a headless browser without network, driven over a pipe by the Chrome DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

NODE_MODULES = Path(os.environ.get("TESSERA_TEST_NODE", "~/.cache/tessera-tests/node")).expanduser() / "node_modules"
PATIENCE_S = 120  # for one answer, on a machine that is busy
# Names lead nowhere; root has no sandbox.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
    *("--hide-scrollbars", "--remote-debugging-pipe", "--host-resolver-rules=MAP * ~NOTFOUND"),
)


class Tab:
    """The one tab of a browser.

    Attributes:
        said: what the page wrote to the console, errors and breaches of its policy too.
        requested: addresses that it asked for, but for itself and its own data.
    """

    def __init__(self, commands: int, answers: int, address: str) -> None:
        self.said: list[str] = []
        self.requested: list[str] = []
        self._commands, self._answers, self._address = commands, answers, address
        self._number, self._session, self._buffer = 0, "", b""
        self._events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self.ask("Network.emulateNetworkConditions", **offline)
        self.ask("Page.navigate", url=address)
        while self.run("document.readyState") != "complete":
            time.sleep(0.05)

    def ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def run(self, code: str) -> Any:
        """The value of an expression on the page, awaited."""
        done = self.ask("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def resize(self, width: int, *, dark: bool = False) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def image(self, *, whole: bool = False) -> bytes:
        return base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE_S)
            assert ready, f"the browser does not answer in {PATIENCE_S} s"
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.said.append(json.dumps(params))
        elif method == "Network.requestWillBeSent":
            address = params["request"]["url"]
            if not address.startswith("data:") and address != self._address:
                self.requested.append(address)


def installed_browser() -> str | None:
    """The program; None where there is none."""
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")


@contextmanager
def opened(page: Path) -> Iterator[Tab]:
    """The tab that shows a file; skips the test without a browser."""
    browser = installed_browser()
    if browser is None:
        pytest.skip("needs chromium-headless-shell: .ci/run installs it where it can")
    (their_end, commands), (answers, other_end) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        pipes = f'exec "$@" 3<&{their_end} 4>&{other_end}'
        command = ["bash", "-c", pipes, "browser", browser, *FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            command,
            pass_fds=(their_end, other_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(their_end)
        os.close(other_end)
        try:
            yield Tab(commands, answers, page.resolve().as_uri())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(commands)
            os.close(answers)
