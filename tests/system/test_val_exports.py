"""val.py on exported files: the metrics of their checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tessera.commands import export, val
from tests.system.tiny import describe_coco128, make_data
from tests.utils.exporting.made import ANCHORED, checkpoint

CPU = {"device": "cpu", "workers": 0}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "imgsz", "known"), [("yolov5n.pt", 320, 0.287), ("yolox_nano.pth", 416, 0.338)])
def test_official_weights_have_the_same_map_on_coco128_in_both_runtimes(
    name: str, imgsz: int, known: float, shared: Path, tmp_path: Path
) -> None:
    for package in ("onnxscript", "onnxruntime", "openvino"):
        pytest.importorskip(package)
    source, data = tmp_path / name, describe_coco128(tmp_path, shared)
    source.write_bytes((shared / "weights" / name).read_bytes())
    written = export.run(weights=str(source), include=["onnx", "openvino"], imgsz=imgsz, device="cpu")
    expected, *found = (
        val.run(weights=str(path), data=str(data), imgsz=imgsz, project=str(tmp_path / "val"), save_json=True, **CPU)
        for path in (source, *written)
    )
    assert expected.map == pytest.approx(known, abs=0.003) and expected.images == 128
    for metrics in found:
        assert metrics.map == pytest.approx(expected.map, abs=1e-3)
        assert metrics.map50 == pytest.approx(expected.map50, abs=1e-3)
        assert (metrics.images, metrics.objects) == (expected.images, expected.objects)
    files = sorted((tmp_path / "val").glob("*/predictions.json"))
    assert len(files) == 3 and len({path.parent.name for path in files}) == 3


def test_an_exported_file_is_matched_to_a_dataset_by_the_names_of_its_classes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three of the dataset's six classes, in another order: as the checkpoint that it was made from."""
    data = make_data(tmp_path, train=1, val=4)
    content = yaml.safe_load(data.read_text())
    data.write_text(yaml.safe_dump({**content, "names": content["names"][::-1]}))
    path = checkpoint(tmp_path / "best.pt", ANCHORED, data=str(data))
    (script,) = export.run(weights=str(path), include=["torchscript"], imgsz=96, device="cpu")
    found = []
    for weights in (path, script):
        caplog.clear()
        found.append(val.run(weights=str(weights), trust_file=True, project=str(tmp_path / "val"), imgsz=96, **CPU))
        assert sum(f"3 of 6 classes of {data} known by name" in line for line in caplog.messages) == 1
    assert found[0].map50 > 0 and found[1].map50 == pytest.approx(found[0].map50, abs=1e-3)
