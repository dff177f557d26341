"""A COCO JSON with gaps in its ids and with crowds: val.py prints and saves the metrics of pycocotools."""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
import yaml
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from tessera.commands import val
from tessera.data.labels.coco import COCO_NAMES
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tests.system.tiny import describe_coco128


def make_dataset(tmp_path: Path, shared: Path, count: int) -> tuple[Path, Path]:
    """The YAML and the JSON of some images of coco128; a quarter of the objects, made larger, are crowds."""
    chance = random.Random(0)
    ids = chance.sample(range(1000, 9000, 7), count)  # not in the order of the files
    category_ids = chance.sample(range(3, 400, 3), len(COCO_NAMES))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "images").symlink_to(shared / "coco128" / "images" / "train2017")
    index = build_index(load_spec(describe_coco128(tmp_path, shared)), "val")
    images, annotations = [], []
    for place, own in enumerate(ids):
        height, width = index.sizes_hw[place].tolist()
        images.append({"id": own, "file_name": index.path(place).name, "height": height, "width": width})
        for category, box in zip(*index.labels(place), strict=True):
            iscrowd = int(chance.random() < 0.25)
            grow = 0.2 * np.tile(box[2:] - box[:2], 2) * (-iscrowd, -iscrowd, iscrowd, iscrowd)
            x1, y1, x2, y2 = np.clip(box + grow, 0, (width, height, width, height)).round(2).tolist()
            row = {"id": len(annotations) + 1, "image_id": own, "category_id": category_ids[category]}
            bbox = [x1, y1, min(round(x2 - x1, 2), width - x1), min(round(y2 - y1, 2), height - y1)]
            ignored = {"ignore": 1} if chance.random() < 0.2 else {}
            annotations.append({**row, "bbox": bbox, "area": bbox[2] * bbox[3], "iscrowd": iscrowd, **ignored})
    categories = [{"id": own, "name": name} for own, name in zip(category_ids, COCO_NAMES, strict=True)]
    chance.shuffle(categories)
    chance.shuffle(annotations)
    truth = tmp_path / "set" / "val.json"
    truth.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    data = tmp_path / "set.yaml"
    data.write_text(yaml.safe_dump({"path": str(tmp_path / "set"), "val": "val.json", "names": list(COCO_NAMES)}))
    return data, truth


def pycocotools(truth: Path, results: Path, max_det: int) -> tuple[float, float]:
    """mAP50-95 and mAP50."""
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(truth)
        evaluation = COCOeval(coco, coco.loadRes(str(results)), "bbox")
        evaluation.params.maxDets = [1, 10, max_det]
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][:, :, :, 0, 2]
    return float(precision[precision > -1].mean()), float(precision[0][precision[0] > -1].mean())


@pytest.mark.parametrize(("images", "max_det"), [(16, 100), pytest.param(128, 300, marks=pytest.mark.slow)])
def test_printed_and_saved_are_pycocotools_own(
    shared: Path, tmp_path: Path, images: int, max_det: int, capsys: pytest.CaptureFixture[str]
) -> None:
    data, truth = make_dataset(tmp_path, shared, images)
    weights = shared / "weights" / "yolov5n.pt"
    options = {"imgsz": 320, "device": "cpu", "workers": 0, "max_det": max_det, "project": str(tmp_path / "runs")}
    metrics = val.run(weights=str(weights), data=str(data), save_json=True, **options)
    expected, expected50 = pycocotools(truth, tmp_path / "runs" / "exp" / "predictions.json", max_det)
    assert 0.2 < expected < 0.9
    assert (metrics.map, metrics.map50) == (pytest.approx(expected, abs=1e-6), pytest.approx(expected50, abs=1e-6))
    (line,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["all"]]
    assert [float(value) for value in line[-2:]] == [pytest.approx(v, abs=6e-4) for v in (expected50, expected)]

    content = json.loads(truth.read_text())
    without = {**content, "annotations": [a for a in content["annotations"] if not a["iscrowd"]]}
    truth.write_text(json.dumps(without))
    other, _ = pycocotools(truth, tmp_path / "runs" / "exp" / "predictions.json", max_det)
    assert abs(other - expected) > 1e-3, "the crowds matter here"
