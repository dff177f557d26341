"""HSV jitter, compared with the formula."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from tessera.data.augment import hsv
from tessera.data.augment.hsv import HsvJitter
from tessera.utils.types import FILL


def plain_hsv(image: np.ndarray, gains: tuple[float, float, float]) -> np.ndarray:
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV).astype(float) * gains
    hsv = np.rint(hsv)
    hsv[..., 0] %= 180
    return cv2.cvtColor(np.clip(hsv, 0, 255).astype(np.uint8), cv2.COLOR_HSV2RGB)


@pytest.mark.parametrize("gains", [(1.015, 1.7, 1.4), (0.985, 0.3017, 0.6043), (1.9, 1.0, 1.0), (1.0, 2.0, 0.0)])
@pytest.mark.parametrize("size_hw", [(64, 64), (37, 51), (1, 1)])
def test_in_place_on_a_view(gains: tuple[float, float, float], size_hw: tuple[int, int]) -> None:
    batch = np.random.default_rng(0).integers(0, 256, (3, *size_hw, 3), np.uint8)
    before = batch.copy()
    HsvJitter(gains)(batch[1])
    assert (batch[1] == plain_hsv(before[1], gains)).all()
    assert (batch[0] == before[0]).all() and (batch[2] == before[2]).all()


def test_strip_by_strip_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    image = np.random.default_rng(0).integers(0, 256, (50, 64, 3), np.uint8)
    whole = image.copy()
    HsvJitter((0.99, 1.3, 0.8))(whole)
    monkeypatch.setattr(hsv, "_STRIP", 7 * 64)
    HsvJitter((0.99, 1.3, 0.8))(image)
    assert (image == whole).all()


@pytest.mark.parametrize("value", [0.6, 1.0, 1.35, 3.0])
def test_grey_is_what_fill_becomes(value: float) -> None:
    jitter = HsvJitter((1.01, 0.7, value))
    image = np.full((5, 40, 3), FILL, np.uint8)
    jitter(image)
    assert (image == jitter.grey).all()
