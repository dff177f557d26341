"""Ignored regions through augmentation: their pixels stay inside regions."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tessera.data.augment.labels import CanvasLabels, append_ignored_regions, warp_labels
from tessera.data.augment.pipeline import choose_copy_paste, train_sample
from tessera.data.augment.warp import Warp
from tessera.utils.config import Hyp, load_hyp
from tessera.utils.seeding import sample_rng
from tessera.utils.types import Draw, Sample
from tests.data.augment.made_scenes import ListSource, hyperparameters, random_boxes, warps

PLAIN = load_hyp("hyp.no-augmentation.yaml")


def labelled(boxes: list[list[float]]) -> CanvasLabels:
    """Regions on a canvas of 100 pixels."""
    empty = Sample(np.zeros((100, 100, 3), np.uint8), np.zeros((0, 4), np.float32), np.zeros(0, np.int32))
    return CanvasLabels.gather([append_ignored_regions(empty, np.array(boxes, np.float32))], [(0, 0)], (100, 100))


def images_with_regions(seed: int) -> ListSource:
    """Black images with red regions, and green objects that have outlines."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(5):
        height, width = rng.integers(20, 65, 2).tolist()
        image = np.zeros((height, width, 3), np.uint8)
        kinds = []
        for channel, count in ((1, 1), (0, 2)):
            boxes = np.rint(random_boxes(count, height, width, rng))
            for x0, y0, x1, y1 in boxes.astype(int):
                image[y0:y1, x0:x1] = 0
                image[y0:y1, x0:x1, channel] = 255
            kinds.append(boxes)
        objects, regions = kinds
        outlines = list(objects[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2))
        samples.append(append_ignored_regions(Sample(image, objects, np.zeros(1, np.int32), outlines), regions))
    return ListSource(samples)


@settings(max_examples=150, deadline=None)
@given(hyperparameters(PLAIN), st.integers(0, 10_000))
@example(dataclasses.replace(PLAIN, translate=0.5, mosaic=1.0, copy_paste=1.0), 0)  # a region begins where one ends
def test_every_pixel_of_a_region_lies_in_a_region(hyp: Hyp, seed: int) -> None:
    out = np.zeros((64, 64, 3), np.uint8)
    draw = Draw(seed % 5, seed, 0, (64, 64), dict.fromkeys(range(5), 0))
    sample = train_sample(draw, images_with_regions(seed).sample, hyp, sample_rng(1, 0, seed), out)
    assert set(sample.classes.tolist()) <= {-1, 0}
    boxes = sample.boxes_xyxy[sample.classes < 0]
    assert (boxes >= 0).all() and (boxes <= 64).all() and (boxes[:, 2:] > boxes[:, :2]).all()
    red = out[..., 0].astype(int) - out[..., 1:].max(2) > (90 if hyp.mixup == 0 else 110)  # grey mixes with a red half
    y, x = np.nonzero(red)
    beside = 0.5 + 1.5 * (1 + hyp.scale)  # pixels that interpolation mixes
    low, high = boxes[:, None, :2] - beside, boxes[:, None, 2:] + beside
    centres = np.stack((x, y), 1) + 0.5
    assert ((centres > low) & (centres < high)).all(2).any(0).all()


@settings(max_examples=100, deadline=None)
@given(warps(), st.integers(0, 2**32 - 1))
def test_whatever_is_in_sight_is_left_in_front_of_any_horizon(warp: Warp, seed: int) -> None:
    rng = np.random.default_rng(seed)
    canvas_h, canvas_w = warp.canvas_hw
    box = random_boxes(1, canvas_h, canvas_w, rng)
    empty = Sample(np.zeros((*warp.canvas_hw, 3), np.uint8), np.zeros((0, 4), np.float32), np.zeros(0, np.int32))
    boxes, classes = warp_labels(
        CanvasLabels.gather([append_ignored_regions(empty, box)], [(0, 0)], warp.canvas_hw), warp
    )
    points = box[0, :2] + rng.random((500, 2)) * (box[0, 2:] - box[0, :2])
    mapped, visible = warp.project(points)
    seen = mapped[visible & (mapped > 0.01).all(1) & (mapped < np.array(warp.size_hw[::-1]) - 0.01).all(1)]
    assert len(boxes) <= 1 and (classes == -1).all()
    if len(seen):
        assert ((seen >= boxes[0, :2] - 0.02) & (seen <= boxes[0, 2:] + 0.02)).all()


def test_the_rules_for_small_and_cut_objects_do_not_apply() -> None:
    half = Warp((100, 100), (100, 100), shift_xy=(0.0, 0.5))  # the left half goes out of sight
    boxes, classes = warp_labels(labelled([[0, 0, 51, 30], [60, 0, 60.5, 30], [60, 40, 99, 40.2], [0, 0, 40, 9]]), half)
    np.testing.assert_allclose(boxes, [[0, 0, 1, 30], [10, 0, 10.5, 30], [10, 40, 49, 40.2]], atol=1e-4)
    assert classes.tolist() == [-1] * 3


def test_regions_are_not_pasted() -> None:
    assert choose_copy_paste(labelled([[0, 0, 20, 20]]), 1.0, 100, np.random.default_rng(0)) is None


def test_what_only_touches_a_region_is_not_pasted() -> None:
    """The outline of a polygon is drawn on the pixels that it touches: one more to the right and below."""
    box = np.array([[10, 10, 30, 30]], np.float32)
    outlines = [*box[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2)]
    for left, is_pasted in ((30, False), (32, True)):
        image = Sample(np.zeros((100, 100, 3), np.uint8), box, np.zeros(1, np.int32), outlines)
        beside = append_ignored_regions(image, np.array([[left, 0, left + 8, 40]], np.float32))
        labels = CanvasLabels.gather([beside], [(0, 0)], (100, 100))
        assert (choose_copy_paste(labels, 1.0, 100, np.random.default_rng(0)) is not None) == is_pasted
