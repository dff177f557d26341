"""pycocotools on the same detections and objects."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from tessera.utils.evaluation.average_precision import average_precision
from tessera.utils.evaluation.curves import summarize
from tessera.utils.evaluation.matching import Regions
from tests.utils.evaluation.made_images import Image, accumulate

NO_REGIONS: Regions = (np.zeros(0, np.int32), np.zeros((0, 4), np.float32))


def coco_evaluate(images: list[Image], nc: int, regions: Sequence[Regions] = ()) -> COCOeval:
    """The same data through pycocotools, every detection allowed; the ignored regions of each image as crowds.

    One of any class is a crowd of each.
    """
    annotations, results = [], []
    for i, (detections, targets, target_classes) in enumerate(images):
        classes, boxes = (part.tolist() for part in (regions[i] if regions else NO_REGIONS))
        crowds = [(box, c) for box, own in zip(boxes, classes, strict=True) for c in ([own] if own >= 0 else range(nc))]
        of_image = [
            *zip(targets.tolist(), target_classes.tolist(), itertools.repeat(0)),
            *((box, c, 1) for box, c in crowds),
        ]
        for (x1, y1, x2, y2), category, iscrowd in of_image:
            row = {"id": len(annotations) + 1, "image_id": i, "category_id": category, "iscrowd": iscrowd}
            annotations.append({**row, "bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)})
        rows = zip(
            detections.boxes_xyxy.double().tolist(),
            detections.scores.tolist(),
            detections.classes.tolist(),
            strict=True,
        )
        for (x1, y1, x2, y2), score, category in rows:
            results.append({"image_id": i, "category_id": category, "bbox": [x1, y1, x2 - x1, y2 - y1], "score": score})
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = {
            "info": {},
            "images": [{"id": i} for i in range(len(images))],
            "annotations": annotations,
            "categories": [{"id": c} for c in range(nc)],
        }
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
        evaluation.params.maxDets = [1, 10, 1000]
        evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def assert_equals_coco(images: list[Image], nc: int, regions: Sequence[Regions] = ()) -> None:
    """Metrics and curves are those of pycocotools."""
    ranking = accumulate(images, regions=regions)
    metrics, curves = summarize(ranking, nc)
    if not any(len(d) for d, _, _ in images):  # pycocotools cannot load an empty list of results
        assert metrics.map == metrics.map50 == 0
        return
    precision = coco_evaluate(images, nc, regions).eval["precision"][:, :, :, 0, -1]  # (T, 101, nc), -1 without objects
    present = precision[0, 0] > -1
    np.testing.assert_array_equal(np.flatnonzero(present), metrics.class_ids)
    if not present.any():
        assert metrics.map == 0
        return
    expected = precision[:, :, present]
    ap, _ = average_precision(ranking, np.ones((len(images), 1), np.float32))
    np.testing.assert_allclose(ap[..., 0], expected.mean(1).T, atol=1e-9)
    np.testing.assert_allclose(curves.precision_at_recall, expected[0].T, atol=1e-9)
    assert metrics.map == pytest.approx(expected.mean(), abs=1e-9)
    assert metrics.map50 == pytest.approx(expected[0].mean(), abs=1e-9)
