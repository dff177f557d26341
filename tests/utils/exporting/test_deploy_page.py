"""The programs of docs/deploy.md, as they stand there, find what Detector finds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.system.launch import run_command
from tests.utils.exporting.made import NAMES, picture
from utils.exporting.writers.openvino import openvino_model, save_openvino
from utils.inference.detector import Detector
from utils.inference.results import Result

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
NODE_MODULES = Path(os.environ.get("TESSERA_TEST_NODE", "~/.cache/tessera-tests/node")).expanduser() / "node_modules"
NUMBERS = ("0", "1", "2")  # of the classes, for programs that do not read names
CONF = 0.4  # of every program on the page
WITHOUT_TELEMETRY = "import sys; sys.modules['openvino_telemetry'] = None; exec(open(sys.argv[1]).read())"
TYPES = {"tensor(uint8)": "TYPE_UINT8", "tensor(float)": "TYPE_FP32", "tensor(int64)": "TYPE_INT64"}
SDK = "#include <onnxruntime_cxx_api.h>\n#include <opencv2/imgcodecs.hpp>\n#include <opencv2/imgproc.hpp>\n"


def program(section: str, language: str) -> str:
    """The code of a section."""
    _, there, rest = PAGE.partition(f"\n## {section}\n")
    code = re.search(rf"^```{language}\n(.*?)^```$", rest.partition("\n## ")[0], flags=re.DOTALL | re.MULTILINE)
    assert there and code, f"{section}: no {language}"
    return code[1]


@pytest.fixture
def folder(tmp_path: Path, made_onnx: Path) -> Path:
    """What the programs expect to lie beside them; the photo has no loss, so that every decoder reads the same."""
    shutil.copy(made_onnx, tmp_path / "best.onnx")
    Image.fromarray(picture(150, 200, 1)).save(tmp_path / "photo.jpg", format="png")
    return tmp_path


@pytest.fixture
def expected(folder: Path, made_pt: Path) -> Result:
    """Of the checkpoint itself."""
    (result,) = Detector(made_pt, imgsz=96, conf_thres=CONF, max_det=300, device="cpu")(folder / "photo.jpg")
    assert len(result.scores) > 5 and len(set(result.classes)) > 1
    return result


def said(command: list[str], folder: Path) -> list[tuple[str, NDArray[np.float64]]]:
    """Class, and score with the box, of each line that a program prints."""
    done = run_command(command, cwd=folder)
    assert done.code == 0, done.said
    lines = [re.fullmatch(r"(\S+) ([\d.]+): ([-\d. ]+)", line) for line in done.out.splitlines()]
    assert all(lines), done.said
    return [(line[1], np.array([line[2], *line[3].split()], np.float64)) for line in lines if line]


def assert_equal(found: list[tuple[str, NDArray[np.float64]]], expected: Result, names: tuple[str, ...]) -> None:
    """Each detection of one side is one of the other; the programs print two digits of a score, one of a side."""
    margin = 1e-2
    sure = [i for i, score in enumerate(expected.scores) if score > CONF + margin]
    left = list(found)
    for i in sure:
        wanted = np.array([expected.scores[i], *expected.boxes_xyxy[i]])
        equal = [
            j
            for j, (name, values) in enumerate(left)
            if name == names[expected.classes[i]] and (np.abs(values - wanted) <= [0.007, *[0.11] * 4]).all()
        ]
        assert equal, f"detection {i}, {wanted}, is not among {left}"
        left.pop(equal[0])
    assert all(values[0] <= CONF + 2 * margin for _, values in left), left


def test_python(folder: Path, expected: Result) -> None:
    (folder / "program.py").write_text(program("ONNX Runtime in Python", "python"))
    assert_equal(said([sys.executable, "-I", "program.py"], folder), expected, NAMES)


def test_openvino(folder: Path, expected: Result) -> None:
    pytest.importorskip("openvino")
    save_openvino(openvino_model((folder / "best.onnx").read_bytes()), folder / "best.xml")
    (folder / "best.onnx").unlink()
    (folder / "program.py").write_text(program("OpenVINO", "python"))
    found = said([sys.executable, "-I", "-c", WITHOUT_TELEMETRY, "program.py"], folder)
    assert_equal(found, expected, NUMBERS)


def run_javascript(folder: Path, package: str, code: str) -> list[tuple[str, NDArray[np.float64]]]:
    """What a program finds with a package of npm, which must be here."""
    node = shutil.which("node")
    missing = [name for name in (package, "sharp") if not (NODE_MODULES / name).is_dir()]
    if node is None or missing:
        pytest.skip(f"needs {'node' if node is None else ', '.join(missing)}: .ci/run installs it where it can")
    (folder / "node_modules").symlink_to(NODE_MODULES)
    (folder / "program.mjs").write_text(code)
    return said([node, "program.mjs"], folder)


def test_javascript(folder: Path, expected: Result) -> None:
    code = program("ONNX Runtime in JavaScript", "js")
    assert_equal(run_javascript(folder, "onnxruntime-node", code), expected, NUMBERS)


def test_javascript_in_webassembly(folder: Path, expected: Result) -> None:
    code, given = program("ONNX Runtime in JavaScript", "js"), ', conf: new ort.Tensor("float32", [0.4], [1])'
    assert given in code and expected.scores.min() > CONF
    code = code.replace(given, "").replace("onnxruntime-node", "onnxruntime-web")
    assert_equal(run_javascript(folder, "onnxruntime-web", code), expected, NUMBERS)


def test_cpp(folder: Path, expected: Result) -> None:
    compiler = shutil.which("c++")
    flags = ["-std=c++17", "-I/usr/include/onnxruntime", "-I/usr/local/include/onnxruntime", "-I/usr/include/opencv4"]
    if compiler is None:
        pytest.skip("needs a compiler of C++")
    probe = [compiler, *flags, "-fsyntax-only", "-x", "c++", "-"]
    if subprocess.run(probe, input=SDK, text=True, capture_output=True, timeout=300).returncode:
        pytest.skip("needs the headers of ONNX Runtime and OpenCV: libonnxruntime-dev, libopencv-dev")
    (folder / "program.cpp").write_text(program("ONNX Runtime in C++", "cpp"))
    libraries = ["-lonnxruntime", "-lopencv_imgcodecs", "-lopencv_imgproc", "-lopencv_core"]
    built = run_command([compiler, *flags, "program.cpp", "-o", "program", *libraries], cwd=folder)
    assert built.code == 0, built.said
    assert_equal(said(["./program"], folder), expected, NUMBERS)


def test_tritons_configuration_is_of_the_file(session: Any) -> None:
    given, _, answered = program("Triton", "pbtxt").partition("output [")
    tensors = r'name: "(\w+)" data_type: (\w+) dims: \[ ([-\d, ]+) \]( optional: true)?'
    optional = session.get_overridable_initializers()

    def described(values: list[Any], end: str) -> list[tuple[str, ...]]:
        sides = [[side if isinstance(side, int) else -1 for side in value.shape] for value in values]
        return [
            (value.name, TYPES[value.type], ", ".join(map(str, shape)), end)
            for value, shape in zip(values, sides, strict=True)
        ]

    assert re.findall(tensors, given) == [
        *described(session.get_inputs(), ""),
        *described(optional, " optional: true"),
    ]
    assert re.findall(tensors, answered) == described(session.get_outputs(), "")
