"""Gains of errors against tidecv and hotcoco."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

import hotcoco
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tidecv import TIDE, Data
from tidecv.ap import APDataObject, ClassedAPDataObject
from tidecv.quantify import TIDERun

from tessera.analysis.error_analysis import error_gains
from tessera.utils.evaluation.average_precision import RECALLS, average_precision
from tessera.utils.evaluation.matching import FALSE_KINDS, Kind, match_image
from tests.utils.evaluation.made_images import Image, accumulate, errors_of, gathered, make_image, random_images, share

MANY = 10_000  # detections an image, more than there are
HOTCOCO = ("Cls", "Loc", "Both", "Dupe", "Bkg", "Miss")


def rows_of(image: Image) -> tuple[list[list[float]], list[list[float]]]:
    """Left, top, width and height of the objects and of the detections."""
    objects, found = image[1].astype(np.float64), image[0].boxes_xyxy.double().numpy()
    return tuple(np.concatenate((b[:, :2], b[:, 2:] - b[:, :2]), 1).tolist() for b in (objects, found))  # type: ignore[return-value]


def tide_run(images: Sequence[Image]) -> TIDERun:
    """The errors by tidecv."""
    truth, found = Data("truth", MANY), Data("found", MANY)
    for i, image in enumerate(images):
        objects, boxes = rows_of(image)
        truth.add_image(i, str(i))
        for box, c in zip(objects, image[2].tolist(), strict=True):
            truth.add_ground_truth(i, c, box)
        for box, c, score in zip(boxes, image[0].classes.tolist(), image[0].scores.tolist(), strict=True):
            found.add_detection(i, c, score, box)
    return TIDE().evaluate(truth, found, mode=TIDE.BOX)


def coco_ap(points: APDataObject) -> float:
    """AP of tidecv's points with the recalls of pycocotools: tidecv's 0.07 is another double."""
    ranked = sorted(points.data_points.values(), key=lambda point: -point[0])
    correct = np.cumsum([point[1] for point in ranked])
    if not ranked or points.num_gt_positives == 0:
        return 0.0
    precision = np.maximum.accumulate((correct / np.arange(1, len(ranked) + 1))[::-1])[::-1]
    reached = np.searchsorted(correct / points.num_gt_positives, RECALLS)
    return float(np.append(precision, 0)[reached].mean())


def tide_gains(images: Sequence[Image]) -> list[float]:
    """In the order of HOTCOCO. The mean is over the classes that have objects, as in COCO: tidecv adds others, as 0."""
    run = tide_run(images)
    classes = [c for c, points in run.ap_data.objs.items() if points.num_gt_positives]

    def mean(data: ClassedAPDataObject) -> float:
        return float(np.mean([coco_ap(data.objs[c]) for c in classes]))

    fixed = [run.fix_errors(lambda error, kind=kind: isinstance(error, kind)) for kind in TIDE._error_types]
    return [mean(data) - mean(run.ap_data) for data in fixed]


def hotcoco_gains(images: Sequence[Image], nc: int) -> list[float]:
    annotations, results = [], []
    for i, image in enumerate(images):
        objects, boxes = rows_of(image)
        for box, c in zip(objects, image[2].tolist(), strict=True):
            row = {"id": len(annotations) + 1, "image_id": i, "category_id": c, "iscrowd": 0, "bbox": box}
            annotations.append({**row, "area": box[2] * box[3]})
        for box, c, score in zip(boxes, image[0].classes.tolist(), image[0].scores.tolist(), strict=True):
            results.append({"image_id": i, "category_id": c, "bbox": box, "score": score})
    sizes = [{"id": i, "width": 640, "height": 640} for i in range(len(images))]
    categories = [{"id": c, "name": str(c)} for c in range(nc)]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = hotcoco.COCO({"images": sizes, "annotations": annotations, "categories": categories})
        evaluation = hotcoco.COCOeval(truth, truth.loadRes(results), "bbox")
        evaluation.params.maxDets = [1, 10, MANY]
        evaluation.evaluate()
    gains = evaluation.tide_errors()["delta_ap"]
    return [gains[kind] for kind in HOTCOCO]


@given(seed=st.integers(0, 2**32 - 1), crowded=st.booleans())
@settings(max_examples=15, deadline=None)
def test_kinds_and_gains_are_those_of_tidecv_and_hotcoco(seed: int, crowded: bool) -> None:
    """Without equal scores or IoUs, whose order is COCO's here and another in each of the two."""
    images = random_images(seed, 8, 4, coarse=False, crowded=crowded)
    assume(any(len(d) for d, _, _ in images) and any(len(c) for _, _, c in images))
    gains = list(error_gains(share(images)).values())
    np.testing.assert_allclose(gains, hotcoco_gains(images, 4), atol=1e-9)
    np.testing.assert_allclose(gains, tide_gains(images), atol=1e-9)
    assert min(gains) > -1e-12


@given(seed=st.integers(0, 2**32 - 1), confidence=st.sampled_from([0.1, 0.5, 0.8]))
@settings(max_examples=15, deadline=None)
def test_errors_at_a_confidence_are_those_of_tidecv_on_the_detections_above(seed: int, confidence: float) -> None:
    images = random_images(seed, 6, 3, coarse=False, crowded=True)
    kept = [(d.scores >= confidence, (d, boxes, classes)) for d, boxes, classes in images]
    above = [make_image(d.boxes_xyxy[k], d.scores[k], d.classes[k], boxes, c) for k, (d, boxes, c) in kept]
    run = tide_run(above)
    expected = [len(run.error_dict[kind]) for kind in TIDE._error_types]
    counts = errors_of(images, 3, confidence).counts()
    assert [counts[kind] for kind in (*FALSE_KINDS, Kind.MISSED)] == expected


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_any_cut_gives_equal_bits(seed: int) -> None:
    images = random_images(seed, 9, 3, coarse=True, crowded=True)
    whole = error_gains(share(images))
    parts = error_gains(gathered([share(images, range(start, 9, 3)) for start in (1, 0, 2)]))
    assert whole == parts


def test_one_error_alone_gains_all_that_is_missing() -> None:
    box, off, far = (0, 0, 100, 100), (0, 0, 100, 30), (200, 200, 300, 300)
    scenes = {
        Kind.WRONG_CLASS: make_image([box, far], [0.9, 0.8], [1, 1], [box, far], [0, 1]),
        Kind.LOCALIZATION: make_image([off], [0.9], [0], [box], [0]),
        Kind.DUPLICATE: make_image([box, box, far], [0.9, 0.8, 0.7], [0, 0, 0], [box, far], [0, 0]),
        Kind.BACKGROUND: make_image([far, box], [0.9, 0.8], [0, 0], [box], [0]),
        Kind.MISSED: make_image([box], [0.9], [0], [box, far], [0, 0]),
    }
    for kind, image in scenes.items():
        ap = average_precision(accumulate([image]), np.ones((1, 1), np.float32))[0][:, 0, 0].mean()
        gains = error_gains(share([image]))
        assert ap + gains[kind] == pytest.approx(1) and sum(gains.values()) == pytest.approx(gains[kind]), kind
    assert match_image(*scenes[Kind.DUPLICATE]).objects.tolist() == [0, 0, 1]


def test_without_an_object_nothing_is_gained() -> None:
    gains = error_gains(share([make_image([[0, 0, 9, 9]], [0.9], [0], [], [])]))
    assert set(gains.values()) == {0.0}
