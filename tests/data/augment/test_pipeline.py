"""Mosaic, mixup, letterbox and random draws: composition, determinism and ranges."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.augment.pipeline import draw_hsv_gains, draw_mosaic, draw_partners, draw_warp, letterbox, render_scene
from tessera.utils.config import Hyp, load_hyp
from tessera.utils.seeding import sample_rng
from tessera.utils.types import FILL, Sample
from tests.data.augment.made_scenes import dataset_of_shapes as dataset
from tests.data.augment.made_scenes import hyperparameters, random_boxes, star, trained

LOW = load_hyp("hyp.scratch-low.yaml")
PLAIN = load_hyp("hyp.no-augmentation.yaml")


@settings(max_examples=80, deadline=None)
@given(
    hyperparameters(LOW),
    st.integers(0, 10_000),
    st.sampled_from([(64, 64), (32, 64), (96, 64)]),
    st.booleans(),
    st.booleans(),
)
def test_any_hyperparameters_give_a_sound_sample(
    hyp: Hyp, seed: int, size_hw: tuple[int, int], mosaic: bool, outlines: bool
) -> None:
    source = dataset(seed, outlines)
    sample = trained(source, hyp, seed, size_hw, mosaic=mosaic)
    again = trained(dataset(seed, outlines), hyp, seed, size_hw, mosaic=mosaic)
    assert (sample.image == again.image).all() and (sample.boxes_xyxy == again.boxes_xyxy).all()
    height, width = size_hw
    boxes = sample.boxes_xyxy
    assert sample.image.shape == (height, width, 3) and sample.image.dtype == np.uint8
    assert boxes.shape == (len(sample.classes), 4) and boxes.dtype == np.float32 and sample.classes.dtype == np.int32
    assert np.isfinite(boxes).all() and (boxes >= 0).all() and (boxes <= [width, height, width, height]).all()
    assert ((boxes[:, 2:] - boxes[:, :2]) > 2).all()
    assert sample.segments == []


@pytest.mark.parametrize("size", [64, 96])
def test_without_augmentation_it_is_the_letterbox(size: int) -> None:
    """Also where the image has to shrink."""
    source = dataset(3, size=size)
    for seed in range(6):
        sample, expected = trained(source, PLAIN, seed), letterbox(source.sample(seed), (64, 64))[0]
        assert (sample.image == expected.image).all()
        sides = expected.boxes_xyxy[:, 2:] - expected.boxes_xyxy[:, :2]
        kept = (sides > 2).all(1)
        np.testing.assert_allclose(sample.boxes_xyxy, expected.boxes_xyxy[kept], atol=1e-4)


def test_mosaic_switch_and_probability() -> None:
    source = dataset(0)
    half = dataclasses.replace(PLAIN, mosaic=0.5)
    letterboxed = [(trained(source, PLAIN, seed).image) for seed in range(200)]
    off = [trained(source, half, seed, mosaic=False).image for seed in range(200)]
    on = [trained(source, half, seed).image for seed in range(200)]
    assert all((a == b).all() for a, b in zip(letterboxed, off, strict=True))
    assert 70 <= sum((a != b).any() for a, b in zip(letterboxed, on, strict=True)) <= 130


def test_sampled_mosaics() -> None:
    indices, centres = [], []
    for seed in range(300):
        scene = draw_mosaic(2, (0, 2, 5, 7), (64, 128), LOW, sample_rng(0, 0, seed))
        assert scene.warp.canvas_hw == (128, 256) and scene.warp.size_hw == (64, 128)
        assert 2 in scene.indices and len(scene.indices) == 4
        indices.append(scene.indices)
        centres.append(scene.centre_xy)
    x, y = np.array(centres).T
    assert 64 <= x.min() < 70 and 186 < x.max() <= 192 and 32 <= y.min() < 35 and 93 < y.max() <= 96
    assert set(np.array(indices).ravel().tolist()) == {0, 2, 5, 7}
    where = np.array(indices) == 2
    assert (where.sum(1) == 1).all() and (where.mean(0) > 0.15).all()  # the sample's own image takes every corner


def test_partners_are_different_where_there_are_enough() -> None:
    for seed in range(50):
        partners = draw_partners(7, (1, 7, 2, 3, 1), 3, sample_rng(0, 0, seed))
        assert len(partners) == 3 and set(partners) <= {1, 2, 3}
        scene = draw_mosaic(7, (1, 2, 7, 3), (64, 64), LOW, sample_rng(0, 0, seed))
        assert sorted(scene.indices) == [1, 2, 3, 7]
    assert draw_partners(7, (7,), 3, sample_rng(0, 0, 0)) == [7, 7, 7]
    assert set(draw_partners(7, (7, 8), 3, sample_rng(0, 0, 0))) == {8}


def test_sampled_warps_span_their_ranges() -> None:
    hyp = dataclasses.replace(LOW, degrees=20.0, shear=5.0, perspective=0.001, flipud=0.3)
    warps = [draw_warp((128, 128), (64, 64), hyp, sample_rng(0, 0, seed)) for seed in range(500)]
    spans = {
        "degrees": ([w.degrees for w in warps], -20, 20),
        "zoom": ([w.zoom for w in warps], 0.5, 1.5),
        "shear": ([s for w in warps for s in w.shear_xy], -5, 5),
        "perspective": ([p for w in warps for p in w.perspective_xy], -0.001, 0.001),
        "shift": ([s for w in warps for s in w.shift_xy], 0.4, 0.6),
    }
    for name, (values, low, high) in spans.items():
        margin = 0.03 * (high - low)
        assert low <= min(values) < low + margin and high - margin < max(values) <= high, name
    assert 0.22 < np.mean([w.flip_ud for w in warps]) < 0.38
    assert 0.42 < np.mean([w.flip_lr for w in warps]) < 0.58


def test_random_numbers_do_not_depend_on_strengths() -> None:
    """Hyperparameters change how strong an augmentation is, not which random numbers the next one gets."""
    strong = dataclasses.replace(LOW, degrees=45.0, shear=10.0, perspective=0.001, flipud=1.0, fliplr=0.0)
    following = []
    for hyp in (LOW, PLAIN, strong):
        rng = sample_rng(0, 0, 4)
        draw_mosaic(1, range(6), (64, 64), hyp, rng)
        draw_hsv_gains(hyp, rng)
        following.append(rng.random())
    assert len(set(following)) == 1


def test_mixup_joins_two_mosaics() -> None:
    source = dataset(1, outlines=False)
    mixed = dataclasses.replace(PLAIN, mosaic=1.0, mixup=1.0)

    def rendered_mosaic(index: int, rng: np.random.Generator) -> Sample:
        scene = draw_mosaic(index, range(6), (64, 64), mixed, rng)
        return render_scene(scene, source.sample, 0.0, rng, np.empty((64, 64, 3), np.uint8))

    ratios = []
    for seed in range(40):
        sample = trained(source, mixed, seed)
        rng = sample_rng(1, 0, seed)
        draw_hsv_gains(mixed, rng)
        rng.random(2)
        first = rendered_mosaic(seed % 6, rng)
        (partner,) = draw_partners(seed % 6, range(6), 1, rng)
        second = rendered_mosaic(partner, rng)
        ratio = rng.beta(32, 32)
        blend = first.image * ratio + second.image * (1 - ratio)
        assert np.abs(sample.image - blend).max() <= 0.51
        assert sample.boxes_xyxy.tolist() == [*first.boxes_xyxy.tolist(), *second.boxes_xyxy.tolist()]
        assert sample.classes.tolist() == [*first.classes.tolist(), *second.classes.tolist()]
        ratios.append(ratio)
    assert 0.45 < np.mean(ratios) < 0.55


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from([(64, 64), (96, 64), (64, 96)]), st.booleans())
def test_letterbox(height: int, width: int, size_hw: tuple[int, int], given_out: bool) -> None:
    rng = np.random.default_rng(height * 100 + width)
    boxes = random_boxes(3, height, width, rng)
    image = rng.integers(0, 114, (height, width, 3), np.uint8)
    before = Sample(image, boxes, np.arange(3, dtype=np.int32), [star(box, rng) for box in boxes])
    out = np.full((*size_hw, 3), 9, np.uint8) if given_out else None
    after, (scale_x, scale_y, left, top) = letterbox(before, size_hw, out)
    assert after.image.shape == (*size_hw, 3) and (out is None or after.image is out)
    np.testing.assert_allclose(
        after.boxes_xyxy, boxes * [scale_x, scale_y, scale_x, scale_y] + [left, top, left, top], rtol=1e-4, atol=1e-3
    )
    for old, new in zip(before.segments, after.segments, strict=True):
        np.testing.assert_allclose(new, old * [scale_x, scale_y] + [left, top], rtol=1e-4, atol=1e-3)
    x0, y0 = int(left), int(top)
    x1, y1 = round(left + scale_x * width), round(top + scale_y * height)
    assert 0 <= x0 < x1 <= size_hw[1] and 0 <= y0 < y1 <= size_hw[0]
    assert 0 <= size_hw[1] - x1 - x0 <= 1 and 0 <= size_hw[0] - y1 - y0 <= 1  # centred
    if height <= size_hw[0] and width <= size_hw[1]:
        assert (scale_x, scale_y) == (1, 1)
        assert (after.image[y0:y1, x0:x1] == image).all()
    else:
        assert x1 - x0 == size_hw[1] or y1 - y0 == size_hw[0]
    border = np.ones(size_hw, bool)
    border[y0:y1, x0:x1] = False
    assert (after.image[border] == FILL).all()


def test_no_global_randomness() -> None:
    state = np.random.get_state()[1].tolist()  # noqa: NPY002 - the point of the test
    trained(dataset(0), dataclasses.replace(LOW, mixup=1.0, copy_paste=0.5, degrees=5.0), 0)
    assert np.random.get_state()[1].tolist() == state  # noqa: NPY002
