"""Tests of missing, broken or failing packages of export formats; metadata of LiteRT and ncnn files."""

from __future__ import annotations

import errno
import importlib
import json
from pathlib import Path

import pytest

from tessera.commands import export
from tessera.deploy.exporting.network_writers import append_metadata
from tessera.deploy.runtime.runtimes import open_exported
from tessera.utils.errors import UserError
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.optional_packages import MissingExtra, import_extra
from tests.deploy.runtime.made_files import STRINGS


def test_a_package_that_does_not_load_is_reported_whatever_it_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_library.py").write_text("import math\nmath.no_such_function\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtra, match=r"needs the package broken-library, .* no attribute 'no_such_function'"):
        import_extra("broken_library", "export", "--include onnx")


VERSIONS = r" Found torch .*, onnx [\d.]+, onnx-ir [\d.]+, onnxscript [\d.]+\. Install .* uv sync --extra export; else"


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("torch.onnx.export", TypeError("no passes\nat all"), rf"onnx: {{}} \(TypeError: no passes\)\.{VERSIONS}"),
        ("torch.onnx.export", OSError("libfoo.so.3: not found"), rf"onnx: {{}} \(OSError: libfoo.*\)\.{VERSIONS}"),
        (
            "torch.onnx.export",
            OSError(errno.ENOSPC, "No space"),
            r"best\.onnx: cannot write the export: No space\. Free",
        ),
        (
            "torch.jit.load",
            RuntimeError("no archive"),
            r"96\.torchscript: {} \(RuntimeError: no .*Found torch .*report it",
        ),
    ],
)
def test_a_library_that_fails_is_one_message_with_its_versions(
    made_pt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, error: Exception, message: str
) -> None:
    """While it writes, or while the file is verified. A full disk is no failure of a library."""
    (tmp_path / "broken_exporter.py").write_text("def export(*args, **options):\n    raise error\n")
    monkeypatch.syspath_prepend(tmp_path)
    broken = importlib.reload(importlib.import_module("broken_exporter"))
    monkeypatch.setattr(broken, "error", error, raising=False)
    monkeypatch.setattr(function, broken.export)
    flags = {"include": ["torchscript"], "raw": True, "imgsz": 96} if "jit" in function else {}
    with pytest.raises(UserError, match=message.format("broken_exporter failed")):
        export.run(weights=str(made_pt), output=str(tmp_path / "files"), device="cpu", **flags)
    assert flags or not any((tmp_path / "files").iterdir())


@pytest.mark.slow
def test_a_defect_of_our_own_is_no_such_message(made_pt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.deploy.exporting.onnx_file._LARGEST", "a number")
    with pytest.raises(TypeError):
        export.run(weights=str(made_pt), output=str(tmp_path), device="cpu")


def test_a_litert_file_without_its_runtime_or_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "best.tflite"
    path.write_bytes(b"\x1c\x00\x00\x00TFL3" + bytes(200))
    with pytest.raises(UserError, match=r"best\.tflite: no file of export\.py"):
        open_exported(path, Accelerator())
    append_metadata(path, STRINGS)
    with pytest.raises(UserError, match=r"best\.tflite: (needs the package ai-edge-litert|LiteRT does not load it)"):
        open_exported(path, Accelerator())


def test_an_ncnn_file_without_the_files_that_belong_to_it(tmp_path: Path) -> None:
    path = tmp_path / "best.ncnn.param"
    path.write_text("7767517\n")
    with pytest.raises(UserError, match=r"best\.ncnn\.bin is not beside it"):
        open_exported(path, Accelerator())
    path.with_suffix(".bin").write_bytes(b"")
    path.with_suffix(".json").write_text(json.dumps({"names": "cat"}))
    with pytest.raises(UserError, match=r"no file of export\.py"):
        open_exported(path, Accelerator())


@pytest.mark.slow
def test_ncnn_detects_what_the_checkpoint_detects(made_pt: Path, tmp_path: Path) -> None:
    """That it does is checked by the export itself."""
    pytest.importorskip("pnnx")
    pytest.importorskip("ncnn")
    source = tmp_path / "best.pt"
    source.write_bytes(made_pt.read_bytes())
    (path,) = export.run(weights=str(source), include=["ncnn"], imgsz=96, device="cpu")
    assert path.name == "best.ncnn.param" and path.with_suffix(".bin").is_file()
