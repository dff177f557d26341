"""A module of JavaScript in a headless browser, which sees this machine alone."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

PAGE = """<!doctype html>
<meta charset="utf-8">
<script type="importmap">
{"imports": {"onnxruntime-web/wasm": "./onnxruntime-web/dist/ort.wasm.bundle.min.mjs"}}
</script>
<script>
const said = [];
for (const kind of ["log", "warn", "error"]) console[kind] = (...words) => said.push(words.join(" "));
const report = (text) => fetch("said", { method: "POST", body: text });
addEventListener("unhandledrejection", (event) => report(`failed: ${event.reason}`));
addEventListener("error", (event) => report(`failed: ${event.message ?? event.target.outerHTML}`), true);
</script>
<script type="module">
%s
await report(said.join("\\n"));
</script>
"""
# Names lead nowhere, so that what is not on this machine cannot be fetched; root has no sandbox.
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


class _Site(SimpleHTTPRequestHandler):
    """A folder; what the page posts is put into a queue."""

    extensions_map = {  # noqa: RUF012
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def __init__(self, *args: object, posted: SimpleQueue[str], **kwargs: str) -> None:
        self._posted = posted
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def do_POST(self) -> None:
        self._posted.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def printed_in_browser(browser: str, code: str, folder: Path, *, timeout: float = 240) -> str:
    """What a module writes to the console, its warnings too, on a page of a folder.

    Raises:
        AssertionError: it failed, or is not done in `timeout` seconds.
    """
    (folder / "index.html").write_text(PAGE % code)
    posted: SimpleQueue[str] = SimpleQueue()
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), partial(_Site, directory=str(folder), posted=posted)) as server,
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/index.html"
        command = [browser, *FLAGS, NO_NETWORK, f"--user-data-dir={profile}", address]
        process = subprocess.Popen(command, stdout=errors, stderr=errors, start_new_session=True)
        try:
            text = posted.get(timeout=timeout)
        except Empty:
            errors.seek(0)
            raise AssertionError(f"nothing in {timeout} s\n{errors.read().decode(errors='replace')}") from None
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            server.shutdown()
    assert not text.startswith("failed: "), text
    return text
