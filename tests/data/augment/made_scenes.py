"""Images with objects, warps and scenes of all kinds, for the tests of augmentation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import cv2
import numpy as np
from hypothesis import strategies as st

from tessera.data.augment.geometry import CanvasLabels, Warp
from tessera.data.augment.pipeline import Scene, render_scene, train_sample
from tessera.data.augment.transforms import OwnTransform
from tessera.utils.config import Hyp
from tessera.utils.seeding import sample_rng
from tessera.utils.types import FILL, Draw, Sample
from tests.data.augment.mosaic_oracle import plain_image

SIZES = st.tuples(st.sampled_from([32, 64, 96]), st.sampled_from([32, 64, 96]))


def hyperparameters(base: Hyp) -> st.SearchStrategy[Hyp]:
    """`base` with any geometry, mosaic, mixup and copy-paste, extremes included."""
    return st.builds(
        functools.partial(dataclasses.replace, base),
        degrees=st.sampled_from([0.0, 15.0, 180.0]),
        translate=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        scale=st.sampled_from([0.0, 0.5, 0.9, 0.999]),
        shear=st.sampled_from([0.0, 10.0, 89.0]),
        perspective=st.sampled_from([0.0, 0.0005, 0.001]),
        **{name: st.sampled_from([0.0, 0.5, 1.0]) for name in ("flipud", "fliplr", "mosaic", "mixup", "copy_paste")},
    )


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


def smooth_image(height: int, width: int, rng: np.random.Generator) -> np.ndarray:
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


def objects(*boxes: list[float], outlines: Sequence[Sequence[tuple[float, float]]] = ()) -> CanvasLabels:
    """Objects of classes 0, 1 …; the first ones may have outlines."""
    counts = np.array([*map(len, outlines), *[0] * (len(boxes) - len(outlines))])
    points = np.array([point for outline in outlines for point in outline], np.float32).reshape(-1, 2)
    classes, weights = np.arange(len(boxes), dtype=np.int32), np.linspace(0, 1, len(boxes), dtype=np.float32)
    return CanvasLabels(np.array(boxes, np.float32), classes, points, counts, weights)


def square(low: float, high: float) -> list[tuple[float, float]]:
    return [(low, low), (high, low), (high, high), (low, high)]


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
    """Scenes with one or four smooth images, from a few pixels to larger than a quarter of the canvas."""
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
        image = smooth_image(tile_h, tile_w, rng)
        samples.append(Sample(image, boxes, classes, segments if outlines and rng.random() < 0.8 else []))
    centre_x, centre_y = rng.uniform(0.5, 1.5, 2) * (width, height)
    return Scene(tuple(range(count)), (int(centre_x), int(centre_y)), warp), ListSource(samples)


def rendered(scene: Scene, source: ListSource) -> Sample:
    out = np.full((*scene.warp.size_hw, 3), 255, np.uint8)
    return render_scene(scene, source.sample, 0.0, np.random.default_rng(0), out)


def dataset_of_shapes(seed: int, outlines: bool = True, size: int = 64) -> ListSource:
    """Six images of long side `size`, of several shapes; the last has no object."""
    rng = np.random.default_rng(seed)
    samples = []
    for i, (height, width) in enumerate([(1, 0.6), (0.7, 1), (1, 1), (0.05, 1), (1, 0.3), (0.8, 1)]):
        height, width = round(height * size), round(width * size)
        boxes = random_boxes(4 if i < 5 else 0, height, width, rng)
        segments = [star(box, rng) if k % 2 else np.zeros((0, 2), np.float32) for k, box in enumerate(boxes)]
        classes = rng.integers(0, 5, len(boxes)).astype(np.int32)
        samples.append(Sample(smooth_image(height, width, rng), boxes, classes, segments if outlines else []))
    return ListSource(samples)


def trained(
    source: ListSource,
    hyp: Hyp,
    seed: int = 0,
    size_hw: tuple[int, int] = (64, 64),
    *,
    mosaic: bool = True,
    transforms: Sequence[OwnTransform] = (),
) -> Sample:
    out = np.full((*size_hw, 3), 7, np.uint8)
    draw = Draw(seed % len(source), seed, 0, size_hw, dict.fromkeys(range(len(source)), 0))
    hyp = hyp if mosaic else dataclasses.replace(hyp, mosaic=0.0)
    sample = train_sample(draw, source.sample, hyp, sample_rng(1, 0, seed), out, transforms, 1, 80)
    assert np.shares_memory(sample.image, out)
    return sample


def share_outside(image: np.ndarray, canvas: np.ndarray, warp: Warp, tolerance: int = 2) -> float:
    """Fraction of pixels that differ from the plain warp of `canvas` by more than interpolation may.

    A resize maps whole pixels on whole pixels, so that it looks up to half a pixel of the canvas and half a pixel of
    the sample beside the exact point; its value lies between those of the canvas's pixels around there.
    """
    if not warp.axis_aligned:
        return float((np.abs(image.astype(int) - plain_image(canvas, warp)) > tolerance).any(2).mean())
    beside = 0.5 + 0.5 / warp.zoom
    reach = int(beside + 1 + 0.5)  # the two pixels between which it interpolates, seen from the nearest to the point
    margin = reach + 2
    padded = cv2.copyMakeBorder(canvas, *[margin] * 4, cv2.BORDER_CONSTANT, value=(FILL,) * 3)
    window = np.ones((2 * reach + 1, 2 * reach + 1), np.uint8)
    low = plain_image(cv2.erode(padded, window), warp, margin, cv2.INTER_NEAREST).astype(int)
    high = plain_image(cv2.dilate(padded, window), warp, margin, cv2.INTER_NEAREST).astype(int)
    return float(((image < low - tolerance) | (image > high + tolerance)).any(2).mean())


def horizon_in_sight(warp: Warp) -> bool:
    half_h, half_w = warp.canvas_hw[0] / 2, warp.canvas_hw[1] / 2
    return abs(warp.perspective_xy[0]) * half_w + abs(warp.perspective_xy[1]) * half_h > 0.5
