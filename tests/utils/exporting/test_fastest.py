"""`--runtime`: another runtime computes a checkpoint, finds what torch finds, and is remembered."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.commands import detect, export, val
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.exporting import fastest
from tessera.utils.exporting.parity.table import Row
from tessera.utils.exporting.parity.verify import Judge
from tessera.utils.inference.detector import Detector
from tessera.utils.types import Metrics
from tests.utils.exporting.made import FREE, checkpoint, dataset

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture
def measured(
    made_pt: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Measures with a runtime; returns the metrics, and what was said of runtimes. Its cache is that of the file."""
    monkeypatch.setenv("TESSERA_CACHE", str(data.parent / "cache"))

    def run(runtime: str, **flags: Any) -> tuple[Metrics, list[str]]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            given = {"weights": str(made_pt), "data": str(data), "device": "cpu", "workers": 0, **flags}
            found = val.run(**given, runtime=runtime, project=str(tmp_path / "runs"), noreport=True)
        return found, [text for text in caplog.messages if "measuring once" in text or "computed by" in text]

    return run


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_it_finds_what_torch_finds_and_is_remembered(measured: Any, runtime: str) -> None:
    pytest.importorskip(runtime)
    expected, said = measured("torch")
    assert not said
    found, said = measured(runtime)
    assert (found.map, found.map50) == pytest.approx((expected.map, expected.map50), abs=1e-4)
    assert [f"computed by {fastest._TITLES[runtime]}" in text for text in said] == [False, True]
    again, said = measured(runtime, batch_size=1)
    assert again.map == found.map and len(said) == 1, "neither measured again, nor by the batch"


def test_of_few_pictures_nothing_is_measured_but_what_is_known_is_used(
    measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured("auto")[1] == []
    timed = []

    class Noted(fastest.Measurement):
        def add(self, batches: Any, sinks: Any = ()) -> None:
            timed.append([len(batch) for batch in batches])
            super().add(batches, sinks)

    with monkeypatch.context() as many:
        many.setattr(fastest, "WORTH_MEASURING", 1)
        many.setattr(fastest, "Measurement", Noted)
        said = measured("auto", batch_size=2)[1]
    assert len(said) == 2 and "torch" in said[1]
    assert len(timed) >= 2 * fastest._ROUNDS and max(timed[0]) == 2, "batches of the validation, by each runtime"
    assert measured("auto", batch_size=2)[1] == said[1:]


def test_one_that_finds_something_else_is_not_used(
    measured: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fastest, "exported", lambda one, job: job.file(one.suffix))
    monkeypatch.setattr(Judge, "file", lambda self, path: Row(path.name, 1.0, "float32", 0.001, failures="other boxes"))
    for _ in range(2):
        with pytest.raises(UserError, match=r"--runtime onnxruntime: does not compute .*: other boxes\. Take"):
            measured("onnxruntime")
    monkeypatch.setattr(fastest, "WORTH_MEASURING", 1)
    assert "computed by torch" in measured("auto")[1][-1]


def test_a_damaged_file_in_the_cache_is_made_anew(measured: Any, data: Path) -> None:
    found, _ = measured("onnxruntime")
    (kept,) = (data.parent / "cache" / "runtimes").glob("*/*.onnx")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-100])
    again, said = measured("onnxruntime")
    assert kept.stat().st_size == len(whole) and again.map == found.map
    assert len(said) == 1, "and not measured again"


def test_what_the_disk_prevents_is_not_remembered(
    measured: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fastest, "WORTH_MEASURING", 1)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "runtimes").write_text("no folder")
    with pytest.raises(UserError, match=r"cannot be written .*TESSERA_CACHE"):
        measured("onnxruntime")
    measured("auto")
    assert "So torch computes." in caplog.text
    (tmp_path / "cache" / "runtimes").unlink()
    assert "computed by ONNX Runtime" in measured("onnxruntime")[1][-1]


def test_weights_that_export_does_not_take_are_computed_too(measured: Any, made_pt: Path, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    export.run(weights=str(made_pt), include=["safetensors"], output=str(tmp_path))
    (weights,) = tmp_path.glob("*.safetensors")
    expected = measured("torch", weights=weights)[0]
    assert measured("onnxruntime", weights=weights)[0].map == pytest.approx(expected.map, abs=1e-4)


def test_the_branch_without_suppression_is_computed_as_such(measured: Any, tmp_path: Path) -> None:
    weights = checkpoint(tmp_path / "free.pt", FREE)
    expected = measured("torch", weights=weights, end2end=True)[0]
    found = measured("onnxruntime", weights=weights, end2end=True)[0]
    assert (found.map, found.map50) == pytest.approx((expected.map, expected.map50), abs=1e-5) and found.map50 > 0


def test_a_detector_changes_its_runtime(made_pt: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(data.parent / "cache"))
    detector = Detector(made_pt, device="cpu", runtime="onnxruntime")
    assert detector.pipeline.backend.compute_apart() == min(torch.get_num_threads(), 8)
    detector.run_in("torch", several=True)
    assert detector.pipeline.backend.compute_apart() == min(torch.get_num_threads(), 8)
    with pytest.raises(ConfigError, match="runtime: found 'tensorrt', expected one of auto"):
        detector.run_in("tensorrt")
    opened = Detector(detector.pipeline.backend)
    opened.run_in("auto")
    with pytest.raises(ConfigError, match="open already, expected auto"):
        opened.run_in("onnxruntime")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"augment": True}, "without --augment"),
        ({"weights": "{onnx}"}, "exported file, and has a runtime of its own"),
        ({"folds": 2, "find_errors": True, "task": "train"}, "--folds .* --runtime"),
    ],
)
def test_what_no_other_runtime_computes_is_said(
    measured: Any, made_onnx: Path, flags: dict[str, Any], why: str
) -> None:
    given = {name: str(value).format(onnx=made_onnx) if value == "{onnx}" else value for name, value in flags.items()}
    with pytest.raises(ConfigError, match=why):
        measured("onnxruntime", **given)
    with pytest.raises(ConfigError, match="--label-next with --runtime"):
        detect.run(source="x.jpg", label_next=1, runtime="onnxruntime")


@pytest.mark.parametrize("package", ["onnxscript", "onnxruntime"])  # which writes the file, and which computes it
def test_a_missing_package_is_named(measured: Any, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"^--runtime onnxruntime: needs the package {package}, .* Install it with"):
        measured("onnxruntime")
    assert measured("auto")[1] == []


def test_detect_finds_the_same(made_pt: Path, data: Path, tmp_path: Path) -> None:
    source = str(data.parent / "shapes" / "images" / "val")
    given = {"weights": str(made_pt), "source": source, "device": "cpu", "project": str(tmp_path), "nosave": True}
    one, other = (detect.run(**given, runtime=runtime) for runtime in ("torch", "onnxruntime"))
    assert one.detections == other.detections > 0
