"""HSV jitter, compared with the formula; filters of Albumentations, with a stand-in if it is not installed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

from tessera.data.augment import pipeline
from tessera.data.augment.pipeline import filter_colours, jitter_hsv, jittered_fill
from tessera.utils.types import FILL


def plain_hsv(image: np.ndarray, gains: tuple[float, float, float]) -> np.ndarray:
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV).astype(float) * gains
    hsv = np.rint(hsv)
    hsv[..., 0] %= 180
    return cv2.cvtColor(np.clip(hsv, 0, 255).astype(np.uint8), cv2.COLOR_HSV2RGB)


@pytest.mark.parametrize("gains", [(1.015, 1.7, 1.4), (0.985, 0.3017, 0.6043), (1.9, 1.0, 1.0), (1.0, 2.0, 0.0)])
@pytest.mark.parametrize("size_hw", [(64, 64), (37, 51), (1, 1)])
def test_jitter_in_place_on_a_view_strip_by_strip(
    gains: tuple[float, float, float], size_hw: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = np.random.default_rng(0).integers(0, 256, (3, *size_hw, 3), np.uint8)
    before = batch.copy()
    jitter_hsv(batch[1], gains)
    assert (batch[1] == plain_hsv(before[1], gains)).all()
    assert (batch[0] == before[0]).all() and (batch[2] == before[2]).all()
    monkeypatch.setattr(pipeline, "_STRIP", 7 * size_hw[1])
    jitter_hsv(before[1], gains)
    assert (before[1] == batch[1]).all()


@pytest.mark.parametrize("value", [0.6, 1.0, 1.35, 3.0])
def test_what_padding_becomes(value: float) -> None:
    image = np.full((5, 40, 3), FILL, np.uint8)
    jitter_hsv(image, (1.01, 0.7, value))
    assert (image == jittered_fill((1.01, 0.7, value))).all()


def stand_in(log: list[tuple[str, dict[str, Any]]]) -> SimpleNamespace:
    """A module whose transforms write down how they were built, and add 1 to the image."""

    def transform(name: str) -> Any:
        def build(**arguments: Any) -> Any:
            log.append((name, arguments))
            return lambda image: {"image": image + 1}

        return build

    return SimpleNamespace(**{name: transform(name) for name in ("Blur", "MedianBlur", "ToGray", "CLAHE")})


def test_rates_parameters_and_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setitem(sys.modules, "albumentations", stand_in(log))
    rng, twin = np.random.default_rng(5), np.random.default_rng(5)
    monkeypatch.setattr(pipeline, "HAS_ALBUMENTATIONS", False)
    filter_colours(np.zeros((2, 2, 3), np.uint8), rng)  # draws nothing
    monkeypatch.setattr(pipeline, "HAS_ALBUMENTATIONS", True)
    added = 0
    for _ in range(3000):
        image = np.zeros((2, 2, 3), np.uint8)
        filter_colours(image, rng)
        added += int(image[0, 0, 0])
        twin.random(4), twin.integers(3, size=2), twin.uniform()
    assert rng.random() == twin.random()  # as many numbers whatever was applied
    names = [name for name, _ in log]
    assert added == len(log)
    assert set(names) == {"Blur", "MedianBlur", "ToGray", "CLAHE"}
    assert all(10 <= names.count(name) <= 55 for name in set(names))  # 30 expected
    for name, arguments in log:
        assert arguments["p"] == 1
        low, high = arguments.get("blur_limit") or arguments.get("clip_limit") or (1, 1)
        assert low == high
        assert (name == "CLAHE" and 1 <= low <= 4) or low in (1, 3, 5, 7)


def test_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("albumentations")
    monkeypatch.setattr(pipeline, "PROBABILITY", 1.0)
    threads = cv2.getNumThreads()
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    one, two = image.copy(), image.copy()
    filter_colours(one, np.random.default_rng(7))
    filter_colours(two, np.random.default_rng(7))
    assert (one == two).all() and (one != image).any()
    assert (one[..., 0] == one[..., 1]).mean() > 0.9  # grey but for what CLAHE rounds
    assert cv2.getNumThreads() == threads
