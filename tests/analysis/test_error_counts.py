"""Errors at a confidence: their kinds, counts and the worst of them; the confusion matrix; ignored regions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.analysis import error_counts
from tessera.utils.evaluation.curves import summarize
from tessera.utils.evaluation.matching import FALSE_KINDS, Kind, Regions, match_image
from tests.utils.evaluation.coco_oracle import assert_equals_coco
from tests.utils.evaluation.made_images import (
    Image,
    accumulate,
    assert_same_bits,
    errors_of,
    make_image,
    matrix_of,
    random_images,
    random_regions,
)

BOX = (0.0, 0.0, 100.0, 100.0)
ELSEWHERE = (300.0, 300.0, 400.0, 400.0)
SLIGHTLY_OFF = (0.0, 0.0, 100.0, 90.0)
OFF = (0.0, 0.0, 100.0, 30.0)  # IoU 0.3
SCENES: dict[Kind, Image] = {
    Kind.CORRECT: make_image([SLIGHTLY_OFF], [0.9], [0], [BOX], [0]),
    Kind.WRONG_CLASS: make_image([SLIGHTLY_OFF], [0.9], [1], [BOX], [0]),
    Kind.LOCALIZATION: make_image([OFF], [0.9], [0], [BOX], [0]),
    Kind.BOTH: make_image([OFF], [0.9], [1], [BOX], [0]),
    Kind.DUPLICATE: make_image([BOX, SLIGHTLY_OFF], [0.9, 0.8], [0, 0], [BOX], [0]),
    Kind.BACKGROUND: make_image([ELSEWHERE], [0.9], [0], [BOX], [0]),
    Kind.MISSED: make_image([], [], [], [BOX], [0]),
}
OUTCOMES = dict.fromkeys(SCENES, Kind.MISSED) | {
    Kind.CORRECT: Kind.CORRECT,
    Kind.DUPLICATE: Kind.CORRECT,
    Kind.WRONG_CLASS: Kind.WRONG_CLASS,
    Kind.LOCALIZATION: Kind.LOCALIZATION,
}


@pytest.mark.parametrize("kind", SCENES)
def test_one_error_of_each_kind(kind: Kind) -> None:
    found = errors_of([SCENES[kind]], 2, 0.5)
    assert {kind for kind, count in found.counts().items() if count} == {kind, *{OUTCOMES[kind]} & {0, Kind.MISSED}}
    assert max(found.counts().values()) == 1 and found.outcomes.tolist() == [OUTCOMES[kind]]
    rows = [row for row in zip(*found.worst, strict=True) if row[0] == kind]
    if kind == Kind.CORRECT:
        assert not rows
        return
    ((_, size, image, place, predicted, about, box),) = rows
    detections, boxes, _ = SCENES[kind]
    assert image == 0 and about == (-1 if kind == Kind.BACKGROUND else 0)
    if kind == Kind.MISSED:
        assert size == 1 and box.tolist() == boxes[0].tolist()
    else:
        assert size == detections.scores[place] and predicted == detections.classes[place]
        assert box.tolist() == detections.boxes_xyxy[place].tolist()


def test_the_threshold_decides_what_is_missed() -> None:
    """Found below it is missed, by less; and what it hid, a wrong class on the same object, comes to light."""
    image = make_image([BOX, BOX, OFF], [0.7, 0.4, 0.3], [1, 0, 0], [BOX], [0])
    for confidence, outcome in ((0.4, Kind.CORRECT), (0.5, Kind.WRONG_CLASS), (0.8, Kind.MISSED)):
        found = errors_of([image], 2, confidence)
        assert found.outcomes.tolist() == [outcome], confidence
    assert found.worst.sizes.tolist() == [1 - np.float32(0.7)] and matrix_of(found)[2, 0] == 1


@given(seed=st.integers(0, 2**32 - 1), ranks=st.integers(2, 5), confidence=st.sampled_from([0.0, 0.3, 0.6]))
@settings(max_examples=25, deadline=None)
def test_counts_divide_all_and_any_cut_gives_equal_bits(seed: int, ranks: int, confidence: float) -> None:
    images = random_images(seed, 9, 3, coarse=bool(seed % 2), crowded=True)
    regions = random_regions(images, seed, 3)
    found = errors_of(images, 3, confidence, regions=regions)
    matches = [match_image(*image, own) for image, own in zip(images, regions, strict=True)]
    counted = sum(int(((m.kinds != Kind.IGNORED) & (m.scores >= confidence)).sum()) for m in matches)
    assert found.image_kind_counts.sum() == found.class_kind_counts.sum() == counted == matrix_of(found)[:3].sum()
    assert len(found.outcomes) == matrix_of(found)[:, :3].sum() == sum(len(c) for _, _, c in images)
    matrix, counts = matrix_of(found), found.counts()
    by_outcome = np.bincount(found.outcomes, minlength=len(Kind))
    assert np.trace(matrix[:3, :3]) == counts[Kind.CORRECT] == by_outcome[Kind.CORRECT]
    assert matrix[:3, :3].sum() - np.trace(matrix[:3, :3]) == by_outcome[Kind.WRONG_CLASS]
    assert matrix[3].sum() == by_outcome[Kind.MISSED] + by_outcome[Kind.LOCALIZATION]
    assert len(found.worst.kinds) == sum(counts.values()) - counts[Kind.CORRECT], "few enough to keep all"
    metrics, curves = summarize(accumulate(images), 3)
    total = matrix_of(errors_of(images, 3, metrics.confidence))
    true = np.bincount(np.concatenate([c for _, _, c in images]), minlength=3)
    for c, precision, recall in zip(metrics.class_ids, *metrics.per_class.T[:2], strict=True):
        assert recall == total[c, c] / true[c]
        assert precision == (total[c, c] / total[c].sum() if total[c].any() else curves.precision[0, -1])
    cut = [range(start, len(images), ranks) for start in reversed(range(ranks))]
    assert_same_bits(errors_of(images, 3, confidence, cut, regions), found)


def test_of_each_kind_the_worst_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ones by any cut, ties included."""
    images = random_images(5, 40, 3, coarse=True, crowded=True)
    everything = errors_of(images, 3, 0.2).worst
    monkeypatch.setattr(error_counts, "MOST_ERRORS", 7)
    found = errors_of(images, 3, 0.2)
    for kind in (*FALSE_KINDS, Kind.MISSED):
        own = found.worst.sizes[found.worst.kinds == kind]
        np.testing.assert_array_equal(own, everything.sizes[everything.kinds == kind][:7])
    assert_same_bits(errors_of(images, 3, 0.2, [range(1, 40, 2), range(0, 40, 2)]), found)


SQUARE, NEAR, HALF, BELOW_HALF = ((0.0, 0.0, 10.0, side) for side in (10.0, 9.0, 5.0, 4.9))
FAR = (50.0, 50.0, 60.0, 60.0)
BACKGROUND = (
    make_image([FAR], [0.9], [1], [SQUARE], [0]),  # a false positive and a missed object
    make_image([SQUARE], [0.9], [0], [], []),
    make_image([], [], [], [SQUARE], [1]),
)


@pytest.mark.parametrize(
    ("images", "matrix"),
    [
        ((make_image([SQUARE], [0.9], [1], [SQUARE], [0]),), [[0, 0, 0], [1, 0, 0], [0, 0, 0]]),
        (BACKGROUND, [[0, 0, 1], [0, 0, 1], [1, 1, 0]]),
        ((make_image([SQUARE, BELOW_HALF], [0.24, 0.25], [0, 0], [SQUARE], [0]),), [[0, 0, 1], [0, 0, 0], [1, 0, 0]]),
        ((make_image([HALF], [0.25], [0], [SQUARE], [0]),), [[1, 0, 0], [0, 0, 0], [0, 0, 0]]),
        (  # an object and a detection count once
            (make_image([NEAR, SQUARE, SQUARE], [0.9, 0.8, 0.3], [1, 0, 1], [SQUARE, NEAR], [0, 0]),),
            [[1, 0, 0], [1, 0, 1], [0, 0, 0]],
        ),
        ((make_image([SQUARE, SQUARE], [0.6, 0.4], [0, 1], [SQUARE], [1]),), [[0, 0, 1], [0, 1, 0], [0, 0, 0]]),
    ],
)
def test_rows_are_predicted_columns_true(images: tuple[Image, ...], matrix: list[list[int]]) -> None:
    assert matrix_of(errors_of(list(images), 2, 0.25)).tolist() == matrix


SMALL = [0.0, 0.0, 10.0, 10.0]


def region(classes: list[int], boxes: list[list[float]]) -> Regions:
    return np.array(classes, np.int32), np.array(boxes, np.float32).reshape(-1, 4)


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 12), nc=st.integers(1, 5), coarse=st.booleans())
@settings(max_examples=60, deadline=None)
def test_equals_pycocotools(seed: int, n: int, nc: int, coarse: bool) -> None:
    images = random_images(seed, n, nc, coarse=coarse, crowded=seed % 2 == 0)
    assert_equals_coco(images, nc, random_regions(images, seed, nc))


def test_a_detection_takes_an_object_before_a_region() -> None:
    image = make_image([SMALL, [2, 2, 8, 8], [20, 20, 30, 30]], [0.9, 0.8, 0.7], [0, 0, 0], [SMALL], [0])
    found = match_image(*image, region([0], [[0, 0, 25, 30]]))
    assert found.correct.tolist() == [2**10 - 1, 0, 0]
    assert found.ignored.tolist() == [0, 2**10 - 1, 1], "an object's, the whole box, half of it"
    other = match_image(*image, region([1], [[0, 0, 25, 30]]))
    assert not other.ignored.any(), "of another class"
    of_any = match_image(*image, region([-1, 1], [[0, 0, 25, 30], [0, 0, 90, 90]]))
    assert of_any.ignored.tolist() == found.ignored.tolist()


def test_precision_and_the_confusion_matrix_leave_out_what_is_in_a_region() -> None:
    image = make_image([SMALL, [20, 20, 30, 30], [20, 20, 30, 30]], [0.5, 0.9, 0.9], [0, 0, 1], [SMALL], [0])
    of_class, of_any = (region([c], [[15, 15, 90, 90]]) for c in (0, -1))
    alone, among = (summarize(accumulate([image], regions), 2)[0] for regions in ((), [of_class]))
    assert alone.map50 == alone.precision == pytest.approx(0.5)
    assert among.map50 == among.precision == among.recall == 1
    matrices = [matrix_of(errors_of([image], 2, regions=[own])).tolist() for own in (of_class, of_any)]
    assert matrices == [[[1, 0, 0], [0, 0, 1], [0, 0, 0]], [[1, 0, 0], [0, 0, 0], [0, 0, 0]]]
