"""The warp against the plain double canvas, and against pictures whose objects are known by their colour."""

from __future__ import annotations

import math

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.augment.canvas import Tile, gaps, render
from data.augment.colours import HsvJitter
from data.augment.labels import CanvasLabels, clip_outlines, warp_labels
from data.augment.scene import Scene, render_scene
from data.augment.warp import Warp
from tests.data.augment.mosaic_oracle import plain_picture, plain_scene
from utils.types import FILL, Sample

SIZES = st.tuples(st.sampled_from([32, 64, 96]), st.sampled_from([32, 64, 96]))


class ListSource:
    """Samples of a list, frozen so that a test fails if augmentation writes into them."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples
        for sample in samples:
            sample.image.flags.writeable = False

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, index: int) -> Sample:
        return self.samples[index]


def smooth_picture(height: int, width: int, rng: np.random.Generator) -> np.ndarray:
    coarse = rng.integers(0, 256, (3, 4, 3), np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)


def random_boxes(count: int, height: int, width: int, rng: np.random.Generator) -> np.ndarray:
    corners = np.sort(rng.uniform(0, 1, (count, 2, 2)), 1) * (width, height)
    return corners.reshape(-1, 4).astype(np.float32)


def star(box: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A concave polygon that fills its box."""
    angles = np.linspace(0, 2 * np.pi, 9)[:-1]
    radius = np.where(np.arange(8) % 2, 0.4, 1.0) * rng.uniform(0.7, 1, 8)
    points = np.stack([np.cos(angles), np.sin(angles)], 1) * radius[:, None]
    low, high = points.min(0), points.max(0)
    return (box[:2] + (points - low) / (high - low) * (box[2:] - box[:2])).astype(np.float32)


@st.composite
def warps(draw: st.DrawFn, canvas: float = 2.0, aligned: bool = False) -> Warp:
    """Warps over the whole range that hyperparameters allow, extremes included."""
    size_hw = draw(SIZES)
    unit = st.floats(-1, 1, allow_nan=False, width=32)
    turned = not aligned and draw(st.booleans())
    perspective = draw(st.sampled_from([0.0, 0.0, 0.0005, 0.004])) if turned else 0.0
    return Warp(
        canvas_hw=(int(canvas * size_hw[0]), int(canvas * size_hw[1])),
        size_hw=size_hw,
        degrees=draw(unit) * draw(st.sampled_from([0, 10, 45, 180])) if turned else 0.0,
        zoom=1 + draw(unit) * draw(st.sampled_from([0, 0.5, 0.9])),
        shear_xy=(draw(unit) * 20, draw(unit) * 20) if turned and draw(st.booleans()) else (0.0, 0.0),
        perspective_xy=(draw(unit) * perspective, draw(unit) * perspective),
        shift_xy=(0.5 + draw(unit) * 0.3, 0.5 + draw(unit) * 0.3),
        flip_ud=draw(st.booleans()),
        flip_lr=draw(st.booleans()),
    )


@st.composite
def scenes(draw: st.DrawFn, outlines: bool, aligned: bool = False) -> tuple[Scene, ListSource]:
    """Scenes with one or four smooth pictures, from a few pixels to larger than a quarter of the canvas."""
    count = draw(st.sampled_from([1, 4]))
    warp = draw(warps(2.0 if count == 4 else 1.0, aligned))
    height, width = warp.size_hw
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples = []
    for _ in range(count):
        largest = (height * 5 // 4, width * 5 // 4) if count == 4 else (height, width)
        tile_h, tile_w = (int(rng.integers(1, side + 1)) for side in largest)
        boxes = random_boxes(draw(st.integers(0, 4)), tile_h, tile_w, rng)
        segments = [star(box, rng) if rng.random() < 0.7 else np.zeros((0, 2), np.float32) for box in boxes]
        classes = rng.integers(0, 80, len(boxes)).astype(np.int32)
        image = smooth_picture(tile_h, tile_w, rng)
        samples.append(Sample(image, boxes, classes, segments if outlines and rng.random() < 0.8 else []))
    centre_x, centre_y = rng.uniform(0.5, 1.5, 2) * (width, height)
    return Scene(tuple(range(count)), (int(centre_x), int(centre_y)), warp), ListSource(samples)


def drawn(scene: Scene, source: ListSource) -> Sample:
    out = np.full((*scene.warp.size_hw, 3), 255, np.uint8)
    return render_scene(scene, source.sample, 0.0, np.random.default_rng(0), out)


def share_outside(image: np.ndarray, canvas: np.ndarray, warp: Warp, tolerance: int = 2) -> float:
    """Share of pixels that differ from the plain warp of `canvas` by more than interpolation may.

    A resize maps whole pixels on whole pixels, so that it looks up to half a pixel of the canvas and half a pixel of
    the sample beside the exact point; its value lies between those of the canvas's pixels around there.
    """
    if not warp.axis_aligned:
        return float((np.abs(image.astype(int) - plain_picture(canvas, warp)) > tolerance).any(2).mean())
    beside = 0.5 + 0.5 / warp.zoom
    reach = int(beside + 1 + 0.5)  # the two pixels between which it interpolates, seen from the nearest to the point
    margin = reach + 2
    padded = cv2.copyMakeBorder(canvas, *[margin] * 4, cv2.BORDER_CONSTANT, value=(FILL,) * 3)
    window = np.ones((2 * reach + 1, 2 * reach + 1), np.uint8)
    low = plain_picture(cv2.erode(padded, window), warp, margin, cv2.INTER_NEAREST).astype(int)
    high = plain_picture(cv2.dilate(padded, window), warp, margin, cv2.INTER_NEAREST).astype(int)
    return float(((image < low - tolerance) | (image > high + tolerance)).any(2).mean())


@settings(max_examples=80, deadline=None)
@given(scenes(outlines=False))
def test_boxes_equal_the_plain_double_canvas(case: tuple[Scene, ListSource]) -> None:
    scene, source = case
    sample, (expected, _) = drawn(scene, source), plain_scene(scene, source.samples)
    if len(sample.boxes_xyxy) != len(expected.boxes_xyxy):
        assert near_threshold(scene, source)
        return
    np.testing.assert_allclose(sample.boxes_xyxy, expected.boxes_xyxy, atol=2e-3)
    assert sample.classes.tolist() == expected.classes.tolist()
    assert sample.boxes_xyxy.dtype == np.float32 and sample.classes.dtype == np.int32


def near_threshold(scene: Scene, source: ListSource) -> bool:
    """Whether a hundredth of a percent more or less zoom changes which objects are kept."""
    counts = set()
    for factor in (0.9999, 1.0, 1.0001):
        warp = scene.warp
        varied = Warp(
            warp.canvas_hw, warp.size_hw, warp.degrees, warp.zoom * factor, warp.shear_xy, warp.perspective_xy,
            warp.shift_xy, warp.flip_ud, warp.flip_lr,
        )  # fmt: skip
        counts.add(len(drawn(Scene(scene.indices, scene.centre_xy, varied), source).boxes_xyxy))
    return len(counts) > 1


@settings(max_examples=80, deadline=None)
@given(scenes(outlines=False))
def test_pixels_equal_the_plain_double_canvas_within_interpolation(case: tuple[Scene, ListSource]) -> None:
    scene, source = case
    if scene.warp.projective and horizon_in_sight(scene.warp):
        return  # beyond the horizon both show ghosts, which differ
    image = drawn(scene, source).image
    _, canvas = plain_scene(scene, source.samples)
    assert share_outside(image, canvas, scene.warp) < 0.002


def horizon_in_sight(warp: Warp) -> bool:
    half_h, half_w = warp.canvas_hw[0] / 2, warp.canvas_hw[1] / 2
    return abs(warp.perspective_xy[0]) * half_w + abs(warp.perspective_xy[1]) * half_h > 0.5


@pytest.mark.parametrize("zoom", [0.5, 0.77, 1.0, 1.3, 1.5])
@pytest.mark.parametrize("degrees", [0.0, 7.0])
def test_pixels_on_real_pictures(shared, zoom: float, degrees: float) -> None:  # type: ignore[no-untyped-def]
    paths = sorted((shared / "coco128" / "images" / "train2017").glob("*.jpg"))[:4]
    samples = []
    for path in paths:
        image = cv2.imread(str(path))
        ratio = 320 / max(image.shape[:2])
        image = cv2.resize(image, None, fx=ratio, fy=ratio, interpolation=cv2.INTER_AREA)
        samples.append(Sample(image, np.zeros((0, 4), np.float32), np.zeros(0, np.int32)))
    warp = Warp((640, 640), (320, 320), degrees=degrees, zoom=zoom, shift_xy=(0.47, 0.56), flip_lr=True)
    scene = Scene((0, 1, 2, 3), (331, 297), warp)
    image = drawn(scene, ListSource(samples)).image
    expected, canvas = plain_scene(scene, samples)
    assert share_outside(image, canvas, warp) < 0.001
    coarse, expected_coarse = (cv2.GaussianBlur(each, (0, 0), 1.5).astype(int) for each in (image, expected.image))
    assert np.abs(coarse - expected_coarse).mean() < (0.01 if degrees else 3)


@settings(max_examples=60, deadline=None)
@given(scenes(outlines=True))
def test_polygons_equal_brute_force(case: tuple[Scene, ListSource]) -> None:
    scene, source = case
    if horizon_in_sight(scene.warp):
        return
    warp = scene.warp
    objects = CanvasLabels.gather(source.samples, [(0, 0) for _ in source.samples], warp.canvas_hw)
    expected, _ = plain_scene(Scene((0,), (0, 0), warp), [at_origin(source.samples, warp)])
    boxes, classes = warp_labels(objects, warp)
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
@given(scenes(outlines=True))
def test_labels_lie_in_the_sample(case: tuple[Scene, ListSource]) -> None:
    scene, source = case
    sample = drawn(scene, source)
    height, width = scene.warp.size_hw
    boxes = sample.boxes_xyxy
    assert np.isfinite(boxes).all() and boxes.shape == (len(sample.classes), 4)
    assert (boxes >= 0).all() and (boxes <= [width, height, width, height]).all()
    assert ((boxes[:, 2:] - boxes[:, :2]) > 2).all()


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
    tile = Tile(image, 0, 0)
    render([tile], warp, out)
    # A box that is turned and cut is looser than its object, by the rule of corners; a polygon is exact.
    segments = [outline] if outlined or not warp.axis_aligned else []
    objects = CanvasLabels.gather([Sample(image, box, np.zeros(1, np.int32), segments)], [tile[1:]], warp.canvas_hw)
    boxes, _ = warp_labels(objects, warp)
    red = np.argwhere(out[..., 0].astype(int) - out[..., 2] > 127)
    if len(boxes) == 0:
        return
    if min(boxes[0, 2:] - boxes[0, :2]) < 4 or min(x1 - x0, y1 - y0) < 4 or warp.zoom < 0.3:
        return  # too thin for its pixels to be told from the interpolation around them
    seen = np.array([*red.min(0)[::-1], *(red.max(0)[::-1] + 1)])
    larger = np.concatenate((seen[:2] - boxes[0, :2], boxes[0, 2:] - seen[2:]))  # of the label, on each side
    assert (larger > -1.6).all(), "pixels outside the label"
    # A sharp corner covers no whole pixel; where the border cuts a side that is turned by 5 degrees, it is a wedge that
    # covers none for half a pixel / tan 5° = 6 pixels, and more with what interpolation takes away.
    height, width = warp.size_hw
    is_cut = bool((boxes[0] <= 0).any() or boxes[0, 2] >= width or boxes[0, 3] >= height)
    sharp = 12.0 if is_cut else 4.0
    assert (larger < (1.6 if warp.axis_aligned else sharp)).all(), "a label too large"


def test_matrix_of_each_step() -> None:
    def centre_and_right(**change):  # type: ignore[no-untyped-def]
        warp = Warp((200, 400), (100, 100), **change)
        points, visible = warp.project(np.array([[200.0, 100.0], [300.0, 100.0], [200.0, 150.0]]))
        assert visible.all()
        return np.round(points, 9).tolist()

    assert centre_and_right() == [[50, 50], [150, 50], [50, 100]]
    assert centre_and_right(zoom=0.5) == [[50, 50], [100, 50], [50, 75]]
    assert centre_and_right(degrees=90) == [[50, 50], [50, 150], [0, 50]]
    assert centre_and_right(shear_xy=(45, 0)) == [[50, 50], [150, 50], [100, 100]]
    assert centre_and_right(shear_xy=(0, 45)) == [[50, 50], [150, 150], [50, 100]]
    assert centre_and_right(shift_xy=(0.25, 1)) == [[25, 100], [125, 100], [25, 150]]
    assert centre_and_right(flip_lr=True) == [[50, 50], [-50, 50], [50, 100]]
    assert centre_and_right(flip_ud=True) == [[50, 50], [150, 50], [50, 0]]
    assert centre_and_right(perspective_xy=(0.01, 0)) == [[50, 50], [100, 50], [50, 100]]


def test_which_objects_are_kept() -> None:
    warp = Warp((100, 100), (100, 100), shift_xy=(0.0, 0.5))  # the left half goes out of sight
    kept = [[60, 0, 90, 30], [41, 0, 60, 30], [30, 50, 53, 80]]
    dropped = [[0, 0, 40, 30], [10, 10, 52.5, 30], [60, 0, 61.9, 30], [60, 0, 90, 2.0], [10, 40, 52, 70]]
    boxes = np.array(kept + dropped, np.float32)
    objects = CanvasLabels(boxes, np.arange(8, dtype=np.int32), np.zeros((0, 2), np.float32), np.zeros(8, np.int64))
    after, classes = warp_labels(objects, warp)
    assert classes.tolist() == [0, 1, 2]
    assert after.tolist() == [[10, 0, 40, 30], [0, 0, 10, 30], [0, 50, 3, 80]]


def test_objects_cut_away_by_the_canvas_are_dropped() -> None:
    """Cut to a line on the canvas's border, a box would come back with an area when that line is turned."""
    tile = Tile(np.zeros((64, 64, 3), np.uint8), -40, 0)
    sample = Sample(tile.image, np.array([[0, 0, 30, 60], [35, 0, 60, 60]], np.float32), np.arange(2, dtype=np.int32))
    objects = CanvasLabels.gather([sample], [tile[1:]], (64, 64))
    assert objects.boxes_xyxy.tolist() == [[0, 0, 0, 60], [0, 0, 20, 60]]
    assert warp_labels(objects, Warp((64, 64), (64, 64), degrees=30.0))[1].tolist() == [1]


def test_long_thin_boxes_are_dropped() -> None:
    warp = Warp((600, 600), (600, 600))
    boxes = np.array([[0, 0, 299, 3], [0, 0, 301, 3]], np.float32)
    objects = CanvasLabels(boxes, np.arange(2, dtype=np.int32), np.zeros((0, 2), np.float32), np.zeros(2, np.int64))
    assert warp_labels(objects, warp)[1].tolist() == [0]


def test_polygon_keeps_with_a_hundredth_of_its_area() -> None:
    warp = Warp((100, 100), (100, 100), shift_xy=(-0.45, 0.5))  # only x ≥ 95 stays in sight
    box = np.array([[0, 0, 100, 100]], np.float32)
    outline = np.array([[0, 0], [100, 0], [100, 100], [0, 100]], np.float32)
    classes = np.zeros(1, np.int32)
    outlined = CanvasLabels(box, classes, outline, np.array([4]))
    boxed = CanvasLabels(box, classes, outline[:0], np.array([0]))
    assert warp_labels(outlined, warp)[0].tolist() == [[0, 0, 5, 100]]
    assert len(warp_labels(boxed, warp)[0]) == 0


def test_polygon_box_is_what_is_in_sight() -> None:
    """A triangle cut at its tip: the box around its corners, cut, would reach further than the triangle does."""
    warp = Warp((100, 100), (100, 100), shift_xy=(0.0, 0.5))
    outline = np.array([[0, 0], [100, 50], [0, 100]], np.float32)
    objects = CanvasLabels(np.array([[0, 0, 100, 100]], np.float32), np.zeros(1, np.int32), outline, np.array([3]))
    assert warp_labels(objects, warp)[0].tolist() == [[0, 25, 50, 75]]


def test_polygon_around_the_whole_sample() -> None:
    """None of its edges is in sight, all of the sample is inside it."""
    warp = Warp((300, 300), (100, 100))
    outline = np.array([[10, 10], [290, 10], [290, 290], [10, 290]], np.float32)
    objects = CanvasLabels(np.array([[10, 10, 290, 290]], np.float32), np.zeros(1, np.int32), outline, np.array([4]))
    assert warp_labels(objects, warp)[0].tolist() == [[0, 0, 100, 100]]


def test_clip_keeps_owners_and_order() -> None:
    square = np.array([[0, 0], [10, 0], [10, 10], [0, 10]], np.float64)
    points = np.concatenate([square, square + 100, square + np.array([5, 0])])
    owners = np.repeat([0, 1, 2], 4)
    left, kept = clip_outlines(points, owners, np.array([[-1.0, 0, 8]]))
    assert kept.tolist() == [0] * 4 + [2] * 4
    assert left[:4].tolist() == [[0, 0], [8, 0], [8, 10], [0, 10]]
    assert left[4:, 0].max() == 8 and left[4:, 0].min() == 5


def test_clip_of_a_concave_polygon_keeps_its_area() -> None:
    rng = np.random.default_rng(3)
    outline = star(np.array([0, 0, 60, 60], np.float32), rng).astype(np.float64)
    right, _ = clip_outlines(outline, np.zeros(8, np.int64), np.array([[1.0, 0, -25]]))
    left, _ = clip_outlines(outline, np.zeros(8, np.int64), np.array([[-1.0, 0, 25]]))
    assert area(right) + area(left) == pytest.approx(area(outline))


def area(points: np.ndarray) -> float:
    x, y = points.T
    return abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1))) / 2


def test_objects_behind_the_horizon_are_dropped() -> None:
    warp = Warp((100, 100), (100, 100), perspective_xy=(0.05, 0.0))
    boxes = np.array([[0, 0, 50, 50], [50, 50, 80, 80]], np.float32)
    outline = np.array([[0, 0], [50, 0], [50, 50], [0, 50]], np.float32)
    boxed = CanvasLabels(boxes, np.arange(2, dtype=np.int32), outline[:0], np.zeros(2, np.int64))
    assert warp_labels(boxed, warp)[1].tolist() == [1]
    outlined = CanvasLabels(boxes, np.arange(2, dtype=np.int32), outline, np.array([4, 0]))
    after, classes = warp_labels(outlined, warp)
    assert classes.tolist() == [0, 1] and np.isfinite(after).all()  # the polygon's part before the horizon stays
    assert math.isclose(after[0, 0], 0)


def test_empty_canvas_view_is_grey() -> None:
    tile = Tile(np.zeros((10, 10, 3), np.uint8), 0, 0)
    for degrees in (0.0, 20.0):
        out = np.zeros((32, 32, 3), np.uint8)
        render([tile], Warp((64, 64), (32, 32), degrees=degrees, shift_xy=(9.0, 9.0)), out)
        assert (out == FILL).all()


@pytest.mark.parametrize("degrees", [0.0, 20.0])
@pytest.mark.parametrize("perspective", [0.0, 1e-4])
def test_writes_into_a_view_and_nowhere_else(degrees: float, perspective: float) -> None:
    batch = np.zeros((3, 32, 64, 3), np.uint8)
    tile = Tile(np.full((64, 128, 3), 200, np.uint8), 0, 0)
    warp = Warp((64, 128), (32, 64), degrees=degrees, perspective_xy=(perspective, 0.0), flip_lr=True, flip_ud=True)
    render([tile], warp, batch[1])
    assert (batch[1] == 200).all() and not batch[0].any() and not batch[2].any()


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 12), st.integers(1, 12))
def test_gaps_are_what_parts_leave(data: st.DataObject, height: int, width: int) -> None:
    x, y = data.draw(st.integers(0, width)), data.draw(st.integers(0, height))
    corners = [(0, y, 0, x), (0, y, x, width), (y, height, 0, x), (y, height, x, width)]
    covered = np.zeros((height, width), int)
    parts = []
    for top, bottom, left, right in corners:
        rows = sorted(data.draw(st.tuples(*[st.integers(top, bottom)] * 2)))
        columns = sorted(data.draw(st.tuples(*[st.integers(left, right)] * 2)))
        parts.append((slice(*rows), slice(*columns)))
    for part in (*parts, *gaps(parts, (height, width))):
        covered[part] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize("zoom", [0.6, 1.0, 1.4])
def test_colours_change_before_or_after_a_resize_wherever_there_are_fewer_pixels(zoom: float) -> None:
    rng = np.random.default_rng(1)
    tile = Tile(smooth_picture(64, 64, rng), 20, 30)
    warp = Warp((128, 128), (96, 96), zoom=zoom, flip_lr=True)
    jitter = HsvJitter((1.01, 0.8, 1.3))
    after, found = np.empty((96, 96, 3), np.uint8), np.empty((96, 96, 3), np.uint8)
    render([tile], warp, after)
    jitter(after)
    kept = tile.image.copy()
    render([tile], warp, found, jitter)
    assert (tile.image == kept).all()
    assert np.abs(after.astype(int) - found).mean() < 1.5
    assert (found[after == jitter.grey] == jitter.grey).mean() > 0.95
