"""val.py measures the same whatever the batch and the number of ranks; and what the original measures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from launch import ROOT, Outcome, run_python, torchrun
from tiny import flags, make_data

from data.index import build_index
from data.spec import load_spec
from utils.coco import COCO_IDS, COCO_NAMES

VAL = ROOT / "val.py"


def figures(outcome: Outcome) -> list[str]:
    """The figures of the line "all", as printed."""
    assert outcome.code == 0, outcome.said
    (line,) = [line for line in outcome.out.splitlines() if line.split()[:1] == ["all"]]
    return line.split()[1:]


@pytest.fixture(scope="module")
def coco128(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    """The YAML of coco128 where it lies."""
    path = tmp_path_factory.mktemp("coco128") / "coco128.yaml"
    content = {"path": str(shared / "coco128"), "train": "images/train2017", "val": "images/train2017"}
    path.write_text(yaml.safe_dump({**content, "names": list(COCO_NAMES)}))
    return path


def test_four_images_on_more_ranks_than_images(tmp_path: Path) -> None:
    data = make_data(tmp_path, train=8, val=4)
    trained = run_python(ROOT / "train.py", *flags(data, tmp_path / "runs", "--epochs", "1"))
    assert trained.code == 0, trained.said
    weights = tmp_path / "runs" / "exp" / "weights" / "best.pt"
    args = ["--data", str(data), "--weights", str(weights), "--imgsz", "64", "--device", "cpu", "--workers", "0"]
    args += ["--project", str(tmp_path / "val"), "--save-json", "--max-det", "20"]
    seen = []
    for ranks in (1, 2, 3, 5):
        outcome = (
            torchrun(VAL, *args, "--name", f"r{ranks}", ranks=ranks)
            if ranks > 1
            else run_python(VAL, *args, "--name", "r1")
        )
        seen.append((figures(outcome), json.loads((tmp_path / "val" / f"r{ranks}" / "predictions.json").read_text())))
    assert all(one[0] == seen[0][0] for one in seen)
    for _, rows in seen[1:]:
        assert len(rows) == len(seen[0][1])
        assert [r["image_id"] for r in rows] == [r["image_id"] for r in seen[0][1]]


@pytest.mark.slow
def test_official_weights_measure_the_same_in_every_batch_and_on_every_number_of_ranks(
    coco128: Path, shared: Path, tmp_path: Path
) -> None:
    args = ["--weights", str(shared / "weights" / "yolov5n.pt"), "--data", str(coco128), "--device", "cpu"]
    args += ["--project", str(tmp_path), "--verbose"]
    outcomes = [run_python(VAL, *args, "--batch", batch, timeout=600) for batch in ("1", "16", "32")]
    outcomes += [torchrun(VAL, *args, ranks=ranks, timeout=600) for ranks in (2, 3)]
    first = figures(outcomes[0])
    assert float(first[-1]) == pytest.approx(0.367, abs=0.003)
    assert float(first[-2]) == pytest.approx(0.563, abs=0.004)
    tables = [re.findall(r"^ +\S.*$", outcome.out, re.M) for outcome in outcomes]
    assert all(table == tables[0] for table in tables[1:]), "every class's line is the same"


def test_the_yaml_of_coco_has_its_names() -> None:
    for name in ("coco.yaml", "coco128.yaml"):
        assert tuple(yaml.safe_load((ROOT / "data" / name).read_text())["names"].values()) == COCO_NAMES


@pytest.mark.slow
def test_mean_average_precision_is_pycocotools_own(coco128: Path, shared: Path, tmp_path: Path) -> None:
    """On the detections of the official weights, written by --save-json, with the same limit of detections."""
    coco = pytest.importorskip("pycocotools.coco")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")
    args = ["--weights", str(shared / "weights" / "yolov5n.pt"), "--data", str(coco128), "--device", "cpu"]
    outcome = run_python(VAL, *args, "--project", str(tmp_path), "--save-json", "--verbose", timeout=600)
    ours = [float(x) for x in figures(outcome)[-2:]]
    rows = json.loads((tmp_path / "exp" / "predictions.json").read_text())
    truth = coco.COCO()
    truth.dataset = ground_truth(coco128)
    truth.createIndex()
    evaluation = cocoeval.COCOeval(truth, truth.loadRes(rows), "bbox")
    evaluation.params.maxDets = [1, 100, 300]
    evaluation.evaluate()
    evaluation.accumulate()
    precision = evaluation.eval["precision"][:, :, :, 0, 2]
    seen = precision[precision > -1]
    assert ours[1] == pytest.approx(seen.mean(), abs=1e-3)
    at50 = precision[0]
    assert ours[0] == pytest.approx(at50[at50 > -1].mean(), abs=1e-3)


def ground_truth(data: Path) -> dict[str, list[dict[str, object]]]:
    """coco128's labels as COCO has them."""
    index = build_index(load_spec(data), "val")
    images, annotations = [], []
    for i in range(len(index)):
        number = int(index.path(i).stem)
        height, width = index.sizes_hw[i].tolist()
        images.append({"id": number, "height": height, "width": width})
        for category, box in zip(*index.labels(i), strict=True):
            x1, y1, x2, y2 = (float(v) for v in box)
            area = (x2 - x1) * (y2 - y1)
            annotations.append(
                {"id": len(annotations) + 1, "image_id": number, "category_id": COCO_IDS[category], "iscrowd": 0}
                | {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": area}
            )
    return {"images": images, "annotations": annotations, "categories": [{"id": i} for i in COCO_IDS]}
