"""val.py measures of an exported file what it measures of its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.commands import export, val
from tessera.utils.errors import ConfigError, UserError
from tests.system.tiny import describe_coco128, make_data
from tests.utils.exporting.made import ANCHORED, checkpoint

CPU = {"device": "cpu", "workers": 0}


@pytest.mark.slow
def test_official_weights_measure_the_same_on_coco128_in_both_runtimes(shared: Path, tmp_path: Path) -> None:
    for package in ("onnxscript", "onnxruntime", "openvino"):
        pytest.importorskip(package)
    source, data = tmp_path / "yolov5n.pt", describe_coco128(tmp_path, shared)
    source.write_bytes((shared / "weights" / "yolov5n.pt").read_bytes())
    written = export.run(weights=str(source), include=["onnx", "openvino"], imgsz=320, device="cpu")
    expected, *found = (
        val.run(weights=str(path), data=str(data), imgsz=320, project=str(tmp_path / "val"), save_json=True, **CPU)
        for path in (source, *written)
    )
    assert expected.map > 0.1 and expected.images == 128
    for metrics in found:
        assert metrics.map == pytest.approx(expected.map, abs=1e-3)
        assert metrics.map50 == pytest.approx(expected.map50, abs=1e-3)
        assert (metrics.images, metrics.objects) == (expected.images, expected.objects)
    files = sorted((tmp_path / "val").glob("*/predictions.json"))
    assert len(files) == 3 and len({path.parent.name for path in files}) == 3


def test_flags_that_an_exported_file_does_not_take(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "best.pt", ANCHORED, data=str(make_data(tmp_path, train=1, val=2)))
    (script,) = export.run(weights=str(path), include=["torchscript"], imgsz=96, device="cpu")
    for flag in ("augment", "end2end", "half"):
        with pytest.raises(ConfigError, match=f"--{flag}: "):
            val.run(weights=str(script), **{flag: True}, **CPU)
    with pytest.raises(UserError, match=r"best\.torchscript: .*program"):
        val.run(weights=str(script), project=str(tmp_path / "val"), **CPU)
    with pytest.raises(UserError, match=r"(?s)3 classes.*tiny\.yaml.* 6"):
        val.run(weights=str(script), trust_file=True, project=str(tmp_path / "val"), **CPU)
    with pytest.raises(UserError, match=r"gone\.onnx"):
        val.run(weights=str(tmp_path / "gone.onnx"), **CPU)
