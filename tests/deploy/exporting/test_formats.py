"""Tests of the export formats: flags, licences, missing packages, and each format's file."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import json
import zipfile
from pathlib import Path

import pytest
import torch

from tessera.commands import export
from tessera.deploy.exporting.flags import ExportConfig
from tessera.deploy.exporting.formats import Format, chosen
from tessera.deploy.exporting.job import ExportJob, describe
from tessera.deploy.exporting.verify import precision_of
from tessera.deploy.runtime.exported import METADATA
from tessera.deploy.runtime.runtimes import open_exported
from tessera.models.detector import DetectionModel
from tessera.utils.checkpoints.format import describe_metrics, describe_run, save_checkpoint
from tessera.utils.checkpoints.weights import load_weights, model_of_weights
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.evaluation.network import ImageDetector, Network
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.optional_packages import MissingExtra, import_extra
from tests.deploy.exporting.made import ANCHORED, NAMES, checkpoint
from tests.deploy.foreign.made import save, small_yolox
from tests.deploy.runtime.made_files import STRINGS


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("weights") / "best.pt", ANCHORED, data="")


def refusal(**flags: object) -> str:
    with pytest.raises(UserError) as caught:
        export.run(device="cpu", **flags)
    return str(caught.value)


def test_names_of_formats() -> None:
    assert [one.name for one in chosen(["pt,onnx", "PT"])] == ["pt", "onnx"]
    with pytest.raises(ConfigError, match=r"no such format\. Did you mean 'onnx'.*Known: onnx, openvino"):
        chosen(["onx"])
    with pytest.raises(ConfigError, match="found nothing"):
        chosen([""])
    with pytest.raises(ConfigError, match=r"--include pt2: no longer written\. Use --include torchscript or onnx"):
        chosen(["pt2"])


MISTAKES: tuple[tuple[dict[str, object], str], ...] = (
    ({"weights": "best.onnx"}, "found a .onnx file, expected the .pt"),
    ({"weights": "missing.pt"}, "no such file"),
    ({"int8": True}, "the dataset that best.pt was trained on is not known"),
    ({"end2end": True}, "no one-to-one branch"),
    ({"raw": True, "imgsz": [100, 64]}, "multiples of 16"),
    ({"imgsz": [64, 96, 32]}, "height and width"),
    ({"conf_thres": "much"}, "a number from 0 to 1"),
    ({"include": ["pt"], "raw": True}, "pt has no such variant"),
    ({"raw": True, "batched": True}, "any batch size"),
    ({"half": True, "int8": True}, "one precision"),
    ({"data": "no_such", "int8": True}, "no such dataset YAML"),
    ({"topk_all": 100}, "--max-det"),
)


@pytest.mark.parametrize(("flags", "said"), MISTAKES)
def test_each_mistake_is_one_message(weights: Path, flags: dict[str, object], said: str) -> None:
    assert said in refusal(**{"weights": str(weights), **flags})
    assert list(weights.parent.glob("*")) == [weights]


def test_a_missing_package_names_its_extra() -> None:
    missing = Format("absent", ".absent", ("int8",), print, "export", quantiser="no_such_package")
    missing.require(ExportConfig())
    wanted = r": needs the package no-such-package.*uv sync --extra export"
    with pytest.raises(UserError, match="--include absent" + wanted):
        dataclasses.replace(missing, packages=("no_such_package",)).require(ExportConfig())
    with pytest.raises(UserError, match="--int8" + wanted):
        missing.require(ExportConfig(int8=True))


def test_files_are_written_beside_the_given_file_and_never_into_the_program(made_pt: Path) -> None:
    assert ExportJob.read(ExportConfig(weights=str(made_pt))).folder == made_pt.parent
    assert ExportJob.read(ExportConfig(weights="tessera-n")).folder == Path()


def test_a_format_that_cannot_be_written_leaves_what_was_there(weights: Path, tmp_path: Path) -> None:
    job = ExportJob.read(ExportConfig(weights=str(weights), output=str(tmp_path)))
    (tmp_path / "best.tflite").mkdir()
    taken = Format("taken", ".tflite", (), lambda _, path: path.write_bytes(b"new") and None)
    with pytest.raises(UserError, match=r"best\.tflite: cannot write the export: .*writable"):
        taken.export(job)
    assert list(tmp_path.iterdir()) == [tmp_path / "best.tflite"]


def test_an_output_that_is_no_folder_is_refused_before_any_work(weights: Path, tmp_path: Path) -> None:
    found = refusal(weights=str(weights), include=["pt"], output=str(tmp_path / "mine.onnx"))
    assert "mine.onnx: found the name of a file, expected a folder" in found
    (tmp_path / "taken").write_text("")
    found = refusal(weights=str(weights), include=["pt"], output=str(tmp_path / "taken"))
    assert "taken: exports cannot be written there (File exists)" in found and "--output" in found
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("half", [False, True])
def test_the_small_pt_is_a_checkpoint(weights: Path, tmp_path: Path, half: bool) -> None:
    content, there = weights.read_bytes(), tmp_path / "new" / "models"
    (path,) = export.run(weights=str(weights), include=["pt"], half=half, output=str(there), device="cpu")
    assert path == there / ("best-half-weights.pt" if half else "best-weights.pt") and list(there.iterdir()) == [path]
    assert list(weights.parent.iterdir()) == [weights] and weights.read_bytes() == content
    before, after = load_weights(weights), load_weights(path)
    assert after.names == NAMES and after.imgsz == before.imgsz == 96
    model = model_of_weights(after, str(path))
    for tensor, original in zip(model.state_dict().values(), before.state_dict.values(), strict=True):
        torch.testing.assert_close(tensor, original, rtol=1e-3 if half else 0, atol=1e-3 if half else 0)


YOLOX = "YOLOX (published weights of YOLOX: Apache-2.0; NOTICE goes with them)"
YOLOV9 = "YOLOv9 (published weights of YOLOv9: MIT; NOTICE goes with them)"


def licence(path: Path, asked: str = "") -> str:
    job = ExportJob.read(ExportConfig(weights=str(path), license=asked))
    return describe(job, whole=False)["license"]


def test_an_original_file_has_the_licence_of_its_family(shared: Path, tmp_path: Path) -> None:
    path = save(tmp_path / "yolox_s.pth", {"model": small_yolox(shared)})
    assert licence(path) == f"Apache-2.0 (what Tessera adds); weights: a file of {YOLOX}"
    assert licence(path, "as agreed") == "as agreed"
    assert licence(shared / "weights" / "yolov5n.pt").endswith(
        "a file of YOLOv5 (published weights of YOLOv5: AGPL-3.0; NOTICE goes with them)"
    )
    (small,) = export.run(weights=str(path), include=["pt"], imgsz=64, device="cpu")
    assert licence(small).endswith(f"; from yolox_s.pth, the name of a file of {YOLOX}")


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("", "weights: as their trainer says"),
        ("v9-t", f"weights: as their trainer says; from v9-t, the name of a file of {YOLOV9}"),
        ("/data/yolox_s.pth", f"weights: as their trainer says; from yolox_s.pth, the name of a file of {YOLOX}"),
        ("runs/train/exp/weights/best.pt", "weights: as their trainer says; from best.pt"),
    ],
)
def test_a_run_says_which_weights_it_was_trained_from(weights: str, said: str, tmp_path: Path) -> None:
    model = DetectionModel(ANCHORED, names=NAMES)
    run = describe_run(model, {"weights": weights, "data": "shapes.yaml"}, {}, 96, "c0ffee")
    save_checkpoint(tmp_path / "best.pt", {**run, **describe_metrics(None), "ema": model.state_dict(), "epoch": 3})
    assert licence(tmp_path / "best.pt") == f"Apache-2.0 (what Tessera adds); {said}"


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


def test_a_litert_file_without_its_runtime_or_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "best.tflite"
    path.write_bytes(b"\x1c\x00\x00\x00TFL3" + bytes(200))
    with pytest.raises(UserError, match=r"best\.tflite: no file of export\.py"):
        open_exported(path, Accelerator())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(METADATA, json.dumps(STRINGS))
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


INCLUDED = ("openvino", "torchscript", "safetensors")


@pytest.fixture(scope="module")
def written(made_pt: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files by suffix; that each detects what the checkpoint detects is checked by the export itself."""
    for package in ("onnx", "onnxscript", "openvino", "safetensors"):
        pytest.importorskip(package)
    source = tmp_path_factory.mktemp("writers") / "best.pt"
    source.write_bytes(made_pt.read_bytes())
    return {path.suffix: path for path in export.run(weights=str(source), include=INCLUDED, imgsz=96, device="cpu")}


@pytest.mark.slow
def test_each_says_what_it_is(written: dict[str, Path]) -> None:
    assert {path.name for path in written.values()} == {"best.xml", "best.torchscript", "best.safetensors"}
    for suffix in (".xml", ".torchscript"):
        opened = open_exported(written[suffix], Accelerator(), trust_file=True)
        assert isinstance(opened, ImageDetector if suffix == ".xml" else Network)
        assert (opened.names, opened.stride, opened.confidence) == (NAMES, 16, 0.375)
        assert opened.imgsz == 96 and opened.class_confidences == (0.25, 0.375, 0.5)
        assert precision_of(written[suffix]).startswith("float32")


@pytest.mark.slow
def test_safetensors_are_weights_as_the_checkpoints(written: dict[str, Path], made_pt: Path) -> None:
    found, before = load_weights(written[".safetensors"]), load_weights(made_pt)
    assert found._replace(state_dict={}, source="") == before._replace(state_dict={}, source="", checkpoint=None)
    assert found.state_dict.keys() == before.state_dict.keys()
    assert all(torch.equal(found.state_dict[name], tensor) for name, tensor in before.state_dict.items())


@pytest.mark.slow
def test_safetensors_that_are_damaged_or_of_another_program(written: dict[str, Path], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    cut, other = tmp_path / "cut.safetensors", tmp_path / "other.safetensors"
    cut.write_bytes(written[".safetensors"].read_bytes()[:900])
    with pytest.raises(UserError, match=r"cut\.safetensors: not a valid safetensors file"):
        load_weights(cut)
    safetensors.save_file({"a": torch.zeros(2)}, other)
    with pytest.raises(UserError, match=r"other\.safetensors: found format None, .*another program"):
        load_weights(other)
