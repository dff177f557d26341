"""Average precision: equal to pycocotools, to the bit over ranks, and at its edges; weighted and resampled images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.utils.evaluation.average_precision import ROUNDS, average_precision, bootstrap_interval, resampled
from tessera.utils.evaluation.curves import summarize
from tessera.utils.evaluation.matching import CONFIDENCES, IOU_THRESHOLDS, match_image, pairwise_iou
from tessera.utils.types import Detections
from tests.utils.evaluation.coco_oracle import NO_REGIONS, assert_equals_coco
from tests.utils.evaluation.made_images import (
    accumulate,
    assert_same_bits,
    flags,
    make_image,
    random_images,
    random_regions,
    ranked,
    share,
)


def test_equals_pycocotools_at_recalls_that_doubles_cannot_hold() -> None:
    """100 objects, so that recall meets 0.07, 0.14, 0.28 ... which a grid of doubles puts a hair above."""
    box, far = [10, 10, 50, 50], [200, 200, 220, 220]
    images = [make_image([box, far], [1 - i / 200, 0.999 - i / 200], [0, 0], [box], [0]) for i in range(100)]
    assert_equals_coco(images, 1)


def test_worked_example() -> None:
    """Two objects; hit, miss, hit: precision 1 up to recall 0.5, 2/3 beyond."""
    image = make_image(
        [[0, 0, 10, 10], [50, 50, 60, 60], [20, 20, 30, 30]],
        [0.9, 0.8, 0.7],
        [0, 0, 0],
        [[0, 0, 10, 10], [20, 20, 30, 30]],
        [0, 0],
    )
    metrics, curves = summarize(accumulate([image]), 2)
    assert metrics.map == pytest.approx((51 + 50 * 2 / 3) / 101)
    assert metrics.fitness == pytest.approx(metrics.map)
    assert metrics.class_ids.tolist() == [0]
    assert metrics.images_per_class.tolist() == [1, 0] and metrics.objects_per_class.tolist() == [2, 0]
    assert (metrics.images, metrics.objects) == (1, 2)
    # F1 is 2/3 with one detection, 0.8 with all three.
    assert metrics.precision == pytest.approx(2 / 3) and metrics.recall == 1
    assert metrics.confidence < 0.7
    at = np.searchsorted(CONFIDENCES, [0.5, 0.75, 0.85, 0.95])
    np.testing.assert_allclose(curves.precision[0, at], [2 / 3, 1 / 2, 1, 1])
    np.testing.assert_allclose(curves.recall[0, at], [1, 1 / 2, 1 / 2, 0])
    np.testing.assert_allclose(curves.f1[0, at], [0.8, 0.5, 2 / 3, 0])


def test_equal_ious_take_the_later_object() -> None:
    """The first detection overlaps both objects by 2/3; it takes the second and leaves the first to the other."""
    left, middle, right = [0, 0, 10, 10], [2, 0, 12, 10], [4, 0, 14, 10]
    image = make_image([middle, left], [0.9, 0.8], [0, 0], [left, right], [0, 0])
    correct = flags(match_image(*image).correct)
    np.testing.assert_array_equal(correct[0], IOU_THRESHOLDS < 2 / 3)
    assert correct[1].all()
    other = flags(match_image(*make_image([middle, left], [0.9, 0.8], [0, 0], [right, left], [0, 0])).correct)
    np.testing.assert_array_equal(other[1], IOU_THRESHOLDS > 2 / 3)
    assert_equals_coco([image], 1)


def test_detections_need_not_be_sorted() -> None:
    image = random_images(3, 1, 2, coarse=False, crowded=True)[0]
    shuffle = torch.randperm(len(image[0]), generator=torch.Generator().manual_seed(0))
    d = image[0]
    mixed = Detections(d.boxes_xyxy[shuffle], d.scores[shuffle], d.classes[shuffle])
    expected, found = match_image(*image), match_image(mixed, *image[1:])
    np.testing.assert_array_equal(found.correct, expected.correct)
    np.testing.assert_array_equal(found.scores, expected.scores)


@given(seed=st.integers(0, 2**32 - 1), nc=st.integers(1, 5), coarse=st.booleans(), ranks=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_ranks_change_no_bit(seed: int, nc: int, coarse: bool, ranks: int) -> None:
    """Precision and recall at each confidence are those counted from all matches (AP: see test_ignored)."""
    images = random_images(seed, 9, nc, coarse=coarse, crowded=seed % 2 == 0)
    regions = random_regions(images, seed, nc) if seed % 3 else [NO_REGIONS] * len(images)
    ranking = ranked([share(images, range(r, 9, ranks), regions) for r in range(ranks)])
    assert_same_bits(ranking, accumulate(images, regions))
    metrics, curves = summarize(ranking, nc)
    found = [match_image(*image, own) for image, own in zip(images, regions, strict=True)]
    assert metrics.objects_per_class.tolist() == [sum((m.target_classes == c).sum() for m in found) for c in range(nc)]
    assert metrics.images_per_class.tolist() == [sum(c in m.target_classes for m in found) for c in range(nc)]
    for row, c in enumerate(metrics.class_ids):
        counts = [(m.classes == c) & ~flags(m.ignored)[:, 0] for m in found]
        hits = [own & flags(m.correct)[:, 0] for own, m in zip(counts, found, strict=True)]
        listed, correct = (
            sum((m.scores[own, None] >= CONFIDENCES).sum(0) for own, m in zip(rows, found, strict=True))
            for rows in (counts, hits)
        )
        if listed[0]:
            np.testing.assert_array_equal(curves.precision[row], np.where(listed, correct / np.maximum(listed, 1), 1))
        np.testing.assert_array_equal(curves.recall[row], correct / metrics.objects_per_class[c])


def test_an_image_counted_twice_is_a_defect() -> None:
    images = random_images(6, 3, 2, coarse=True)
    with pytest.raises(AssertionError, match="twice"):
        ranked([share(images, [0, 1]), share(images, [1, 2])])


def test_nothing_at_all() -> None:
    for images in ([], [make_image([], [], [], [], [])], [make_image([[0, 0, 9, 9]], [0.9], [1], [], [])]):
        ranking = accumulate(images)
        metrics, curves = summarize(ranking, 3)
        assert (metrics.map, metrics.map50, metrics.precision, metrics.recall, metrics.fitness) == (0,) * 5
        assert metrics.per_class.shape == (0, 4) and curves.f1.shape == (0, 1000)
        assert metrics.images == len(images) and metrics.objects_per_class.tolist() == [0, 0, 0]
        assert np.isnan(bootstrap_interval(ranking, np.random.default_rng(0))).all()


def test_each_class_has_a_confidence_of_its_own() -> None:
    """Class 0 is best without a false detection of score 0.5, class 1 with a hit of 0.2; 2 and 3 have no say."""
    box, far = [0.0, 0, 10, 10], [50.0, 50, 60, 60]
    image = make_image([box, far, box, far], [0.9, 0.5, 0.2, 0.1], [0, 0, 1, 2], [box, box, box], [0, 1, 2])
    metrics, _ = summarize(accumulate([image]), 4)
    first, second, *others = metrics.class_confidences
    assert 0.5 < first < 0.9 and second < 0.2
    assert others == [metrics.confidence] * 2
    given, _ = summarize(accumulate([image]), 4, threshold=0.85)
    assert (given.confidence, given.precision, given.recall) == (0.85, 1, pytest.approx(1 / 3))


def test_iou_of_boxes_without_an_area_and_of_read_only_ones() -> None:
    boxes = np.array([[5, 5, 5, 5], [0, 0, 10, 10]], np.float32)
    boxes.setflags(write=False)  # as mapped labels are
    iou = pairwise_iou(boxes, np.array([*boxes, [0, 0, 10, 5]]))
    assert iou.dtype == np.float64 and iou.tolist() == [[0, 0, 0], [0, 1, 0.5]]
    assert pairwise_iou(boxes, np.zeros((0, 4), np.float32)).shape == (2, 0)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_weights_equal_repeated_images(seed: int) -> None:
    """Brute force: an image that counts k times, with its regions, is k copies (scores distinct between images)."""
    rng = np.random.default_rng(seed)
    images = random_images(seed, 7, 3, coarse=True, distinct=True)
    regions = random_regions(images, seed, 3)
    weights = rng.integers(0, 4, (7, 3)).astype(np.float32)
    ranking = accumulate(images, regions)
    ap, present = average_precision(ranking, weights)
    for r in range(3):
        copies = [i for i, times in enumerate(weights[:, r].astype(int)) for _ in range(times)]
        repeated, _ = summarize(accumulate([images[i] for i in copies], [regions[i] for i in copies]), 3)
        np.testing.assert_array_equal(ranking.class_ids[present[:, r]], repeated.class_ids)
        np.testing.assert_allclose(ap[present[:, r], :, r].mean(1), repeated.per_class[:, 3], atol=1e-12)
        assert not ap[~present[:, r], :, r].any()


def test_bootstrap_interval() -> None:
    ranking = accumulate(random_images(8, 60, 3, coarse=False, crowded=True))
    metrics, _ = summarize(ranking, 3)
    interval = bootstrap_interval(ranking, np.random.default_rng(0))
    assert interval == bootstrap_interval(ranking, np.random.default_rng(0))
    samples = resampled(ranking, np.random.default_rng(0), ROUNDS).maps()
    for sampled, (low, high), measured in zip(samples, interval, (metrics.map50, metrics.map), strict=True):
        quarter, three_quarters = np.quantile(sampled, (0.25, 0.75))
        assert low < quarter < measured < three_quarters < high
        assert ((sampled >= low) & (sampled <= high)).mean() == pytest.approx(0.95, abs=0.01)
    ragged = resampled(ranking, np.random.default_rng(0), 130).maps()  # the last chunk is a smaller one
    np.testing.assert_array_equal(ragged[:, :100], samples[:, :100])
    assert np.isfinite(ragged).all()
