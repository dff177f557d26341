"""Error analysis of val.py on coco128, compared with tidecv and hotcoco."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tessera.analysis.error_analysis import ERROR_KINDS, NAMES, error_gains
from tessera.commands import val
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.deploy.inference.result_files import COCO_IDS
from tests.analysis.test_error_analysis import hotcoco_gains, tide_gains, tide_run
from tests.system.launch import Command
from tests.system.tiny import describe_coco128
from tests.utils.evaluation.made_images import Image, make_image, share


def detected(results: Path, data: Path) -> list[Image]:
    index, found = build_index(load_spec(data), "val"), json.loads(results.read_text())
    by_image: dict[int, list[dict[str, object]]] = {int(index.path(i).stem): [] for i in range(len(index))}
    for row in found:
        by_image[row["image_id"]].append(row)
    images = []
    for i in range(len(index)):
        classes, boxes = index.labels(i)
        rows = by_image[int(index.path(i).stem)]
        corners = np.array([row["bbox"] for row in rows]).reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        predicted = [COCO_IDS.index(row["category_id"]) for row in rows]  # type: ignore[arg-type]
        images.append(make_image(corners, [row["score"] for row in rows], predicted, boxes, classes))
    return images


@pytest.mark.slow
def test_errors_of_official_weights(shared: Path, tmp_path: Path, command: Command) -> None:
    data = describe_coco128(tmp_path, shared)
    weights = str(shared / "weights" / "yolov5n.pt")
    args = ["--weights", weights, "--data", str(data), "--device", "cpu", "--project", str(tmp_path), "--save-json"]
    done = command(val.main, *args)
    assert done.code == 0, done.said
    images = detected(tmp_path / "exp" / "predictions.json", data)
    gains = error_gains(share(images))
    listed = list(gains.values())
    np.testing.assert_allclose(listed, hotcoco_gains(images, 80), atol=1e-9)
    np.testing.assert_allclose(listed, tide_gains(images), atol=1e-9)

    (line,) = [line for line in done.out.splitlines() if line.startswith("At confidence ")]
    confidence = float(line.split()[2].rstrip(":"))
    rows = [json.loads(row) for row in (tmp_path / "exp" / "errors.jsonl").read_text().splitlines()]
    said = {
        row[:22].strip(): row[22:].split()[:2] for row in done.out.splitlines() if row[:22].strip() in NAMES.values()
    }
    counts = Counter(row["kind"] for row in rows)
    sure = [
        make_image(d.boxes_xyxy[k], d.scores[k], d.classes[k], b, c)
        for d, b, c in images
        for k in [d.scores >= confidence]
    ]
    run = tide_run(sure)
    with (tmp_path / "exp" / "images.csv").open() as file:
        table = list(csv.DictReader(file))
    for kind, errors in zip(ERROR_KINDS, run.error_dict.values(), strict=True):
        name = NAMES[kind]
        assert said[name][0] == str(counts[name]) == str(sum(int(row[name]) for row in table))
        assert abs(counts[name] - len(errors)) <= 2, "the confidence is printed to three digits"
        assert float(said[name][1]) == pytest.approx(gains[kind], abs=0.0006)
        cost = sum(row["cost"] for row in rows if row["kind"] == name)
        assert cost == pytest.approx(gains[kind], rel=1e-3)
    assert [row["cost"] for row in rows] == sorted((row["cost"] for row in rows), reverse=True)
    for row in rows:
        if row["true"] is not None:
            assert row["label"].endswith(f"{Path(row['image']).stem}.txt")
            number = int(Path(row["label"]).read_text().splitlines()[row["line"] - 1].split()[0])
            assert load_spec(data).names[number] == row["true"]
