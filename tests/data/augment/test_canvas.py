"""Rendered pixels of a sample, compared with the oracle on the whole canvas."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given, settings

from tessera.data.augment.geometry import Warp
from tessera.data.augment.pipeline import Scene, jitter_hsv, jittered_fill, render
from tessera.utils.types import FILL, Sample
from tests.data.augment.made_scenes import ListSource, horizon_in_sight, rendered, scenes, share_outside, smooth_image
from tests.data.augment.mosaic_oracle import plain_scene


@settings(max_examples=80, deadline=None)
@given(scenes(outlines=False))
def test_pixels_equal_the_plain_double_canvas_within_interpolation(case: tuple[Scene, ListSource]) -> None:
    scene, source = case
    if scene.warp.projective and horizon_in_sight(scene.warp):
        return  # beyond the horizon both show ghosts, which differ
    image = rendered(scene, source).image
    _, canvas = plain_scene(scene, source.samples)
    assert share_outside(image, canvas, scene.warp) < 0.002


@pytest.mark.parametrize("zoom", [0.5, 0.77, 1.0, 1.3, 1.5])
@pytest.mark.parametrize("degrees", [0.0, 7.0])
def test_pixels_on_real_images_with_regions(shared, zoom: float, degrees: float) -> None:  # type: ignore[no-untyped-def]
    paths = sorted((shared / "coco128" / "images" / "train2017").glob("*.jpg"))[:4]
    samples = []
    for path in paths:
        image = cv2.imread(str(path))
        ratio = 320 / max(image.shape[:2])
        image = cv2.resize(image, None, fx=ratio, fy=ratio, interpolation=cv2.INTER_AREA)
        samples.append(Sample(image, np.zeros((0, 4), np.float32), np.zeros(0, np.int32)))
    warp = Warp((640, 640), (320, 320), degrees=degrees, zoom=zoom, shift_xy=(0.47, 0.56), flip_lr=True)
    scene = Scene((0, 1, 2, 3), (331, 297), warp)
    image = rendered(scene, ListSource(samples)).image
    expected, canvas = plain_scene(scene, samples)
    assert share_outside(image, canvas, warp) < 0.001
    coarse, expected_coarse = (cv2.GaussianBlur(each, (0, 0), 1.5).astype(int) for each in (image, expected.image))
    assert np.abs(coarse - expected_coarse).mean() < (0.01 if degrees else 3)


def test_empty_canvas_view_is_grey() -> None:
    image = np.zeros((10, 10, 3), np.uint8)
    for degrees in (0.0, 20.0):
        out = np.zeros((32, 32, 3), np.uint8)
        render([image], [(0, 0)], Warp((64, 64), (32, 32), degrees=degrees, shift_xy=(9.0, 9.0)), out)
        assert (out == FILL).all()


@pytest.mark.parametrize("degrees", [0.0, 20.0])
@pytest.mark.parametrize("perspective", [0.0, 1e-4])
def test_writes_into_a_view_and_nowhere_else(degrees: float, perspective: float) -> None:
    batch = np.zeros((3, 32, 64, 3), np.uint8)
    warp = Warp((64, 128), (32, 64), degrees=degrees, perspective_xy=(perspective, 0.0), flip_lr=True, flip_ud=True)
    render([np.full((64, 128, 3), 200, np.uint8)], [(0, 0)], warp, batch[1])
    assert (batch[1] == 200).all() and not batch[0].any() and not batch[2].any()


@pytest.mark.parametrize("zoom", [0.6, 1.0, 1.4])
def test_colours_change_before_or_after_a_resize_wherever_there_are_fewer_pixels(zoom: float) -> None:
    rng = np.random.default_rng(1)
    image = smooth_image(64, 64, rng)
    warp = Warp((128, 128), (96, 96), zoom=zoom, flip_lr=True)
    gains = (1.01, 0.8, 1.3)
    after, found = np.empty((96, 96, 3), np.uint8), np.empty((96, 96, 3), np.uint8)
    render([image], [(20, 30)], warp, after)
    jitter_hsv(after, gains)
    kept = image.copy()
    render([image], [(20, 30)], warp, found, gains)
    assert (image == kept).all()
    assert np.abs(after.astype(int) - found).mean() < 1.5
    assert (found[after == jittered_fill(gains)] == jittered_fill(gains)).mean() > 0.95
