"""Boxes of segmentations, against pycocotools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools import mask as oracle

from tessera.data.labels.coco import mask_box

POLYGON = st.lists(st.floats(-12, 60, width=32), min_size=6, max_size=24).map(lambda xy: xy[: len(xy) // 2 * 2])
SIZE = st.tuples(st.integers(1, 50), st.integers(1, 50))


def expected(rle: Any) -> list[float] | None:
    """The oracle's box as corners."""
    x, y, width, height = oracle.toBbox(rle).tolist()
    return [x, y, x + width, y + height] if width and height else None


def found(segmentation: Any, size_hw: tuple[int, int]) -> list[float] | None:
    box = mask_box(segmentation, size_hw)
    return None if box is None else list(box)


@settings(max_examples=300)
@given(st.lists(POLYGON, min_size=1, max_size=3), SIZE)
def test_polygons(parts: list[list[float]], size_hw: tuple[int, int]) -> None:
    assert found(parts, size_hw) == expected(oracle.merge(oracle.frPyObjects(parts, *size_hw)))


@given(SIZE, st.integers(0, 1000), st.floats(0, 1))
def test_run_lengths(size_hw: tuple[int, int], seed: int, filled: float) -> None:
    mask = np.asfortranarray(np.random.default_rng(seed).random(size_hw) < filled, np.uint8)
    rle = oracle.encode(mask)
    pixels = mask.flatten(order="F")
    ends = [*(np.flatnonzero(np.diff(pixels)) + 1).tolist(), len(pixels)]
    counts = np.diff([0, *([0] if pixels[0] else []), *ends]).tolist()
    for form in (rle["counts"].decode(), counts):
        assert found({"size": [*size_hw], "counts": form}, size_hw) == expected(rle)


@pytest.mark.parametrize(
    "segmentation",
    [
        None, 3, "x", [], {}, [[]], [[1, 2, 3]], [[1, 1, 1, 1, 1, 1]], [[1e308, 0, 0, 0, 0, 9]],
        {"size": [8, 8], "counts": [64]}, {"size": [8, 8], "counts": [-1, 65]}, {"size": [8, 8], "counts": [1, 2]},
        {"size": [10, 8], "counts": [1, 79]}, {"size": [8, 8], "counts": "é" * 99}, {"size": 8, "counts": []},
        {"size": [8, 8], "counts": "o" * 9_999_999}, {"counts": None}, {"size": [8, 8], "counts": [0.5, 63.5]},
        [[(-1) ** place * 6e4 if place % 2 else place for place in range(40_000)]],
    ],
)  # fmt: skip
def test_no_mask_of_this_image(segmentation: Any) -> None:
    assert mask_box(segmentation, (8, 8)) is None


def test_run_lengths_of_a_size_that_is_off_by_one() -> None:
    """They are decoded by their own; the box is cut to the image elsewhere."""
    assert mask_box({"size": [8, 9], "counts": [8, 3, 61]}, (8, 8)) == (1, 0, 2, 3)
    assert mask_box({"size": [9, 8], "counts": [0, 72]}, (8, 8)) == (0, 0, 8, 9)
    assert mask_box({"size": [0, 5], "counts": []}, (1, 5)) is None
