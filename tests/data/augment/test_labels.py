"""Labels of a sample, compared with the oracle and with the sample's pixels.

Also ignored regions through augmentation: their pixels stay inside regions.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tessera.data.augment.geometry import CanvasLabels, Warp, append_regions, warp_labels
from tessera.data.augment.pipeline import Scene, choose_copy_paste, render, train_sample
from tessera.utils.config import Hyp, load_hyp
from tessera.utils.seeding import sample_rng
from tessera.utils.types import Draw, Sample
from tests.data.augment.made_scenes import (
    ListSource,
    horizon_in_sight,
    hyperparameters,
    objects,
    random_boxes,
    rendered,
    scenes,
    square,
    warps,
)
from tests.data.augment.mosaic_oracle import plain_scene


def append_ignored_regions(sample: Sample, regions_xyxy: NDArray[np.float32]) -> Sample:
    return append_regions(sample, regions_xyxy, np.full(len(regions_xyxy), -1, np.int32))


@settings(max_examples=80, deadline=None)
@given(scenes(outlines=False))
def test_boxes_equal_the_plain_double_canvas(case: tuple[Scene, ListSource]) -> None:
    scene, source = case
    sample, (expected, _) = rendered(scene, source), plain_scene(scene, source.samples)
    if len(sample.boxes_xyxy) != len(expected.boxes_xyxy):
        assert near_threshold(scene, source)
        return
    np.testing.assert_allclose(sample.boxes_xyxy, expected.boxes_xyxy, atol=2e-3)
    assert sample.classes.tolist() == expected.classes.tolist()
    assert sample.boxes_xyxy.dtype == np.float32 and sample.classes.dtype == np.int32


def near_threshold(scene: Scene, source: ListSource) -> bool:
    """Whether a hundredth of a percent more or less zoom changes which objects remain."""
    counts = set()
    for factor in (0.9999, 1.0, 1.0001):
        varied = dataclasses.replace(scene.warp, zoom=scene.warp.zoom * factor)
        counts.add(len(rendered(Scene(scene.indices, scene.centre_xy, varied), source).boxes_xyxy))
    return len(counts) > 1


@settings(max_examples=60, deadline=None)
@given(scenes(outlines=True))
def test_polygons_equal_brute_force(case: tuple[Scene, ListSource]) -> None:
    scene, source = case
    if horizon_in_sight(scene.warp):
        return
    warp = scene.warp
    labels = CanvasLabels.gather(source.samples, [(0, 0) for _ in source.samples], warp.canvas_hw)
    expected, _ = plain_scene(Scene((0,), (0, 0), warp), [at_origin(source.samples, warp)])
    boxes, classes, _ = warp_labels(labels, warp)
    found = match(expected, boxes, classes)
    # Brute force sees a polygon by quarter pixels: slivers may be missed, so compare where both have found it.
    assert len(found) >= min(len(boxes), len(expected.boxes_xyxy)) - 1 - len(boxes) // 4
    for ours, theirs in found:
        np.testing.assert_allclose(ours, theirs, atol=0.8)


def at_origin(samples: list[Sample], warp: Warp) -> Sample:
    """One sample of the canvas's size with the labels of all, so that none is moved."""
    segments = []
    for sample in samples:
        empty = [np.zeros((0, 2), np.float32)] * len(sample.classes)
        segments += sample.segments or empty
    return Sample(
        np.zeros((*warp.canvas_hw, 3), np.uint8),
        np.concatenate([s.boxes_xyxy for s in samples]),
        np.concatenate([s.classes for s in samples]),
        segments,
    )


def match(expected: Sample, boxes: np.ndarray, classes: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    pairs = []
    for box, label in zip(boxes, classes, strict=True):
        same = expected.boxes_xyxy[expected.classes == label]
        if len(same):
            pairs.append((box, same[np.abs(same - box).sum(1).argmin()]))
    return pairs


@settings(max_examples=60, deadline=None)
@given(warps(), st.integers(0, 2**32 - 1), st.booleans())
def test_labels_lie_on_the_pixels(warp: Warp, seed: int, outlined: bool) -> None:
    """A red object on black, its label from the geometry and its extent from the pixels."""
    if horizon_in_sight(warp):
        return
    rng = np.random.default_rng(seed)
    canvas_h, canvas_w = warp.canvas_hw
    box = np.rint(random_boxes(1, canvas_h, canvas_w, rng))
    image = np.zeros((canvas_h, canvas_w, 3), np.uint8)  # black with a red object; what is filled is grey
    x0, y0, x1, y1 = box[0].astype(int)
    outline = np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]], np.float32)
    image[y0:y1, x0:x1, 0] = 255
    out = np.empty((*warp.size_hw, 3), np.uint8)
    render([image], [(0, 0)], warp, out)
    # A box that is turned and cut is looser than its object, by the rule of corners; a polygon is exact.
    segments = [outline] if outlined or not warp.axis_aligned else []
    labels = CanvasLabels.gather([Sample(image, box, np.zeros(1, np.int32), segments)], [(0, 0)], warp.canvas_hw)
    boxes, *_ = warp_labels(labels, warp)
    red = np.argwhere(out[..., 0].astype(int) - out[..., 2] > 127)
    if len(boxes) == 0:
        return
    if min(boxes[0, 2:] - boxes[0, :2]) < 4 or min(x1 - x0, y1 - y0) < 4 or warp.zoom < 0.3:
        return  # too thin to distinguish its pixels from the interpolation around them
    seen = np.array([*red.min(0)[::-1], *(red.max(0)[::-1] + 1)])
    larger = np.concatenate((seen[:2] - boxes[0, :2], boxes[0, 2:] - seen[2:]))  # of the label, on each side
    assert (larger > -1.6).all(), "pixels outside the label"
    # A sharp corner covers no whole pixel; where the edge cuts a side that is turned by 5 degrees, it is a wedge that
    # covers none for half a pixel / tan 5° = 6 pixels, and more with what interpolation takes away.
    height, width = warp.size_hw
    is_cut = bool((boxes[0] <= 0).any() or boxes[0, 2] >= width or boxes[0, 3] >= height)
    sharp = 12.0 if is_cut else 4.0
    assert (larger < (1.6 if warp.axis_aligned else sharp)).all(), "a label too large"


def test_which_objects_are_kept() -> None:
    warp = Warp((100, 100), (100, 100), shift_xy=(0.0, 0.5))  # the left half goes out of sight
    kept = [[60, 0, 90, 30], [41, 0, 60, 30], [30, 50, 53, 80]]
    dropped = [[0, 0, 40, 30], [10, 10, 52.5, 30], [60, 0, 61.9, 30], [60, 0, 90, 2.0], [10, 40, 52, 70]]
    after, classes, _ = warp_labels(objects(*kept, *dropped), warp)
    assert classes.tolist() == [0, 1, 2]
    assert after.tolist() == [[10, 0, 40, 30], [0, 0, 10, 30], [0, 50, 3, 80]]


def test_objects_cut_away_by_the_canvas_are_dropped() -> None:
    """Cut to a line on the canvas's edge, a box would come back with an area when that line is turned."""
    sample = Sample(
        np.zeros((64, 64, 3), np.uint8),
        np.array([[0, 0, 30, 60], [35, 0, 60, 60]], np.float32),
        np.arange(2, dtype=np.int32),
    )
    found = CanvasLabels.gather([sample], [(-40, 0)], (64, 64))
    assert found.boxes_xyxy.tolist() == [[0, 0, 0, 60], [0, 0, 20, 60]]
    assert warp_labels(found, Warp((64, 64), (64, 64), degrees=30.0))[1].tolist() == [1]


CANVAS = [0, 0, 100, 100]


@pytest.mark.parametrize(
    ("labels", "warp", "boxes"),
    [
        # Long thin boxes are dropped.
        (objects([0, 0, 299, 3], [0, 0, 301, 3]), Warp((600, 600), (600, 600)), [[0, 0, 299, 3]]),
        # Of an object from 0 to 100, x ≥ 95 is visible: enough of a polygon, too little of a box.
        (
            objects(CANVAS, outlines=[square(0, 100)]),
            Warp((100, 100), (100, 100), shift_xy=(-0.45, 0.5)),
            [[0, 0, 5, 100]],
        ),
        (objects(CANVAS), Warp((100, 100), (100, 100), shift_xy=(-0.45, 0.5)), []),
        # A triangle clipped at its tip: the clipped box around its corners would be larger.
        (
            objects(CANVAS, outlines=[[(0, 0), (100, 50), (0, 100)]]),
            Warp((100, 100), (100, 100), shift_xy=(0.0, 0.5)),
            [[0, 25, 50, 75]],
        ),
        # A polygon around the whole sample, none of whose edges is visible.
        (objects([10, 10, 290, 290], outlines=[square(10, 290)]), Warp((300, 300), (100, 100)), [CANVAS]),
    ],
)
def test_boxes_by_hand(labels: CanvasLabels, warp: Warp, boxes: list[list[float]]) -> None:
    assert warp_labels(labels, warp)[0].tolist() == boxes


def test_objects_behind_the_horizon_are_dropped() -> None:
    warp = Warp((100, 100), (100, 100), perspective_xy=(0.05, 0.0))
    boxes = [0, 0, 50, 50], [50, 50, 80, 80]
    assert warp_labels(objects(*boxes), warp)[1].tolist() == [1]
    after, classes, _ = warp_labels(objects(*boxes, outlines=[square(0, 50)]), warp)
    assert classes.tolist() == [0, 1] and np.isfinite(after).all()  # the polygon's part before the horizon stays
    assert math.isclose(after[0, 0], 0)


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
    boxes, classes, _ = warp_labels(
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
    boxes, classes, _ = warp_labels(
        labelled([[0, 0, 51, 30], [60, 0, 60.5, 30], [60, 40, 99, 40.2], [0, 0, 40, 9]]), half
    )
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
