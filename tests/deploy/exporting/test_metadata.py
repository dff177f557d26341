"""Tests of the licence in the metadata of exported files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.commands import export
from tessera.deploy.exporting.flags import ExportConfig
from tessera.deploy.exporting.job import ExportJob, describe
from tessera.models.detector import DetectionModel
from tessera.utils.checkpoints.format import save_checkpoint
from tessera.utils.checkpoints.provenance import describe_metrics, describe_run
from tests.deploy.exporting.made import ANCHORED, NAMES
from tests.utils.checkpoints.foreign.made import save, small_yolox

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
