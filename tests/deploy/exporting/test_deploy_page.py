"""Tests of the programs of docs/deploy.md: they detect what Detector detects."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from tessera.deploy.exporting.formats import openvino_model
from tessera.deploy.inference.detector import Detector
from tessera.deploy.inference.results import Result
from tessera.utils.machine.opencv import cv2
from tessera.utils.types import Detections
from tests.browser import NODE_MODULES, installed_browser
from tests.deploy.exporting.made import NAMES, differing, made_image
from tests.system.launch import run_command

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
NUMBERS = ("0", "1", "2")  # of the classes, for programs that do not read names
Limits = tuple[float, float, int]  # conf, iou, max_det
Printed = list[tuple[str, NDArray[np.float64]]]
WRITTEN: Limits = (0.4, 0.45, 300)  # in every program on the page
OTHER: Limits = (0.2, 0.25, 16)
IMAGE = made_image(150, 200, 8)
WITHOUT_TELEMETRY = "import sys; sys.modules['openvino_telemetry'] = None; exec(open(sys.argv[1]).read())"
TYPES = {"tensor(uint8)": "TYPE_UINT8", "tensor(float)": "TYPE_FP32", "tensor(int64)": "TYPE_INT64"}
SDK = "#include <onnxruntime_cxx_api.h>\n#include <opencv2/imgcodecs.hpp>\n#include <opencv2/imgproc.hpp>\n"

IN_BROWSER = """<!doctype html>
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


def program(section: str, language: str) -> str:
    """The code of a section, in the page or in the file that it links."""
    _, there, rest = PAGE.partition(f"\n## {section}\n")
    text = rest.partition("\n## ")[0]
    if file := re.search(r"\]\(\.\./(deploy/clients/[\w.]+)\)", text):
        return (ROOT / file[1]).read_text()
    code = re.search(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert there and code, f"{section}: no {language}"
    return code[1]


def other(code: str) -> str:
    """The program with other thresholds: a runtime that ignores one detects what the page's own would."""
    for written, instead in zip(WRITTEN, OTHER, strict=True):
        code, count = re.subn(rf"(?<![\d.]){re.escape(str(written))}(?!\d)", str(instead), code)
        assert count == 1, f"{written} is there {count} times"
    return code


@pytest.fixture
def folder(tmp_path: Path, made_onnx: Path) -> Path:
    """What the programs expect to lie beside them; the photo has no loss, so that every decoder reads the same."""
    shutil.copy(made_onnx, tmp_path / "best.onnx")
    Image.fromarray(IMAGE).save(tmp_path / "photo.jpg", format="png")
    return tmp_path


@pytest.fixture(scope="module")
def expected(made_pt: Path) -> dict[Limits, Result]:
    """What the checkpoint itself detects at both sets of thresholds; each of the second is one that shows."""

    def of_checkpoint(conf: float, iou: float, max_det: int) -> Result:
        detector = Detector(made_pt, imgsz=96, conf_thres=conf, iou_thres=iou, max_det=max_det, device="cpu")
        return next(detector(IMAGE))

    found = {limits: of_checkpoint(*limits) for limits in (WRITTEN, OTHER)}
    assert all(len(one.scores) > 5 and len(set(one.classes)) > 1 for one in found.values())
    for place in range(3):
        forgotten = of_checkpoint(*OTHER[:place], WRITTEN[place], *OTHER[place + 1 :])
        assert not np.array_equal(forgotten.boxes_xyxy, found[OTHER].boxes_xyxy)
    return found


def said(command: list[str], folder: Path) -> Printed:
    """Class, and score with the box, of each line that a program prints; there is nothing that it need say beside."""
    done = run_command(command, cwd=folder)
    assert done.code == 0 and not done.err, done.said
    return parsed(done.out)


def parsed(text: str) -> Printed:
    lines = [re.fullmatch(r"(\S+) ([\d.]+): ([-\d. ]+)", line) for line in text.splitlines()]
    assert all(lines), text
    return [(line[1], np.array([line[2], *line[3].split()], np.float64)) for line in lines if line]


def assert_equal(found: Printed, expected: Result, limits: Limits, names: tuple[str, ...]) -> None:
    """Each detection of one side is one of the other; the programs print two digits of a score, one of a side."""
    conf, _, max_det = limits
    weakest = float(expected.scores[-1]) if len(expected.scores) == max_det else conf
    numbers = np.array([values for _, values in found]).reshape(-1, 5)
    printed = {"boxes": numbers[:, 1:], "scores": numbers[:, 0], "classes": [names.index(name) for name, _ in found]}
    wanted = Detections(*map(torch.tensor, (expected.boxes_xyxy, expected.scores, expected.classes)))
    assert differing(wanted, printed, weakest, px=0.11, score=0.007) == 0, found
    assert len(found) <= max_det


def assert_both_equal(
    run: Callable[[str], Printed], code: str, expected: dict[Limits, Result], names: tuple[str, ...]
) -> None:
    for limits, lines in ((WRITTEN, code), (OTHER, other(code))):
        assert_equal(run(lines), expected[limits], limits, names)


def run_python(folder: Path, code: str) -> Printed:
    (folder / "program.py").write_text(code)
    return said([sys.executable, "-I", "-c", WITHOUT_TELEMETRY, "program.py"], folder)


def test_python(folder: Path, expected: dict[Limits, Result]) -> None:
    code = program("ONNX Runtime in Python", "python")
    assert_both_equal(partial(run_python, folder), code, expected, NAMES)


def test_openvino(folder: Path, expected: dict[Limits, Result]) -> None:
    openvino = pytest.importorskip("openvino")
    model = openvino_model((folder / "best.onnx").read_bytes())
    openvino.save_model(model, folder / "best.xml", compress_to_fp16=False)
    (folder / "best.onnx").unlink()
    assert_both_equal(partial(run_python, folder), program("OpenVINO", "python"), expected, NUMBERS)


@pytest.mark.skipif(int(cv2.__version__.split(".")[0]) < 5, reason="OpenCV 4 reads no sizes that vary")
def test_opencv(folder: Path, expected: dict[Limits, Result]) -> None:
    code = program("OpenCV", "python")
    assert_both_equal(partial(run_python, folder), code, expected, NUMBERS)
    assert run_python(folder, code.replace("0.4]", "1]")) == [], "nothing is found"


@pytest.mark.slow
def test_node(folder: Path, expected: dict[Limits, Result]) -> None:
    node = shutil.which("node")
    missing = [name for name in ("onnxruntime-node", "sharp") if not (NODE_MODULES / name).is_dir()]
    if node is None or missing:
        pytest.skip(f"needs {'node' if node is None else ', '.join(missing)}: .ci/run installs it where it can")
    (folder / "node_modules").symlink_to(NODE_MODULES)

    def run(code: str) -> Printed:
        (folder / "program.mjs").write_text(code)
        return said([node, "program.mjs"], folder)

    assert_both_equal(run, program("ONNX Runtime in Node", "js"), expected, NUMBERS)


class _Site(SimpleHTTPRequestHandler):
    """A folder; what the page posts is put into a queue."""

    extensions_map = {".html": "text/html", ".mjs": "text/javascript", ".wasm": "application/wasm"}  # noqa: RUF012

    def __init__(self, *args: object, posted: SimpleQueue[str], **kwargs: str) -> None:
        self._posted = posted
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def do_POST(self) -> None:
        self._posted.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def printed_in_browser(browser: str, code: str, folder: Path) -> str:
    """What a module writes to the console, its warnings too, on a page of a folder."""
    (folder / "index.html").write_text(IN_BROWSER % code)
    posted: SimpleQueue[str] = SimpleQueue()
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), partial(_Site, directory=str(folder), posted=posted)) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/index.html"
        command = [browser, *FLAGS, NO_NETWORK, f"--user-data-dir={profile}", address]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            text = posted.get(timeout=240)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            server.shutdown()
    assert not text.startswith("failed: "), text
    return text


@pytest.mark.slow
def test_a_browser(folder: Path, expected: dict[Limits, Result]) -> None:
    browser = installed_browser()
    package = NODE_MODULES / "onnxruntime-web"
    if browser is None or not package.is_dir():
        missing = "chromium-headless-shell" if browser is None else package.name
        pytest.skip(f"needs {missing}: .ci/run installs it where it can")
    (folder / "onnxruntime-web").symlink_to(package)
    code = program("ONNX Runtime in a browser", "js")
    assert_both_equal(lambda lines: parsed(printed_in_browser(browser, lines, folder)), code, expected, NUMBERS)


def test_cpp(folder: Path, expected: dict[Limits, Result]) -> None:
    compiler = shutil.which("c++")
    flags = ["-std=c++17", "-I/usr/include/onnxruntime", "-I/usr/local/include/onnxruntime", "-I/usr/include/opencv4"]
    if compiler is None:
        pytest.skip("needs a compiler of C++")
    probe = [compiler, *flags, "-fsyntax-only", "-x", "c++", "-"]
    if subprocess.run(probe, input=SDK, text=True, capture_output=True, timeout=300).returncode:
        pytest.skip("needs the headers of ONNX Runtime and OpenCV: libonnxruntime-dev, libopencv-dev")
    libraries = ["-lonnxruntime", "-lopencv_imgcodecs", "-lopencv_imgproc", "-lopencv_core"]

    def run(code: str) -> Printed:
        (folder / "program.cpp").write_text(code)
        built = run_command([compiler, *flags, "program.cpp", "-o", "program", *libraries], cwd=folder)
        assert built.code == 0, built.said
        return said(["./program"], folder)

    assert_both_equal(run, program("ONNX Runtime in C++", "cpp"), expected, NUMBERS)


def test_benchmark_app_is_given_what_the_file_takes(session: Any) -> None:
    (line,) = re.findall(r'^benchmark_app .*-data_shape "(.*)"$', PAGE, re.MULTILINE)
    given = {name: list(map(int, sides.split(","))) for name, sides in re.findall(r"(\w+)\[([\d,]+)\]", line)}
    taken = {value.name: value.shape for value in session.get_inputs()}
    assert given.keys() == taken.keys()
    for name, shape in taken.items():
        assert all(isinstance(side, str) or side == own for side, own in zip(shape, given[name], strict=True)), name


def test_tritons_configuration_is_of_the_file(session: Any) -> None:
    given, _, answered = program("Triton", "pbtxt").partition("output [")
    tensors = r'name: "(\w+)" data_type: (\w+) dims: \[ ([-\d, ]+) \]( optional: true)?'

    def described(values: list[Any]) -> list[tuple[str, ...]]:
        sides = [[side if isinstance(side, int) else -1 for side in value.shape] for value in values]
        return [
            (value.name, TYPES[value.type], ", ".join(map(str, shape)), "")
            for value, shape in zip(values, sides, strict=True)
        ]

    assert re.findall(tensors, given) == described(session.get_inputs())
    assert re.findall(tensors, answered) == described(session.get_outputs())
