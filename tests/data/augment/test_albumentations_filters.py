"""Filters of Albumentations, with a stand-in if the package is not installed."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

from tessera.data.augment import albumentations_filters
from tessera.data.augment.albumentations_filters import albumentations_filter, no_filter, open_filter


def stand_in(log: list[tuple[str, dict[str, Any]]]) -> SimpleNamespace:
    """A module whose transforms write down how they were built, and add 1 to the image."""

    def transform(name: str) -> Any:
        def build(**arguments: Any) -> Any:
            log.append((name, arguments))
            return lambda image: {"image": image + 1}

        return build

    return SimpleNamespace(**{name: transform(name) for name in ("Blur", "MedianBlur", "ToGray", "CLAHE")})


def test_absent_package_means_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(albumentations_filters.importlib.util, "find_spec", lambda name: None)
    assert open_filter() is no_filter
    monkeypatch.setattr(albumentations_filters.importlib.util, "find_spec", lambda name: object())
    assert pickle.loads(pickle.dumps(open_filter())) is albumentations_filter


def test_rates_parameters_and_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setitem(sys.modules, "albumentations", stand_in(log))
    colour, rng, twin = albumentations_filter, np.random.default_rng(5), np.random.default_rng(5)
    added = 0
    for _ in range(3000):
        image = np.zeros((2, 2, 3), np.uint8)
        colour(image, rng)
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
    monkeypatch.setattr(albumentations_filters, "PROBABILITY", 1.0)
    threads = cv2.getNumThreads()
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    one, two = image.copy(), image.copy()
    albumentations_filter(one, np.random.default_rng(7))
    albumentations_filter(two, np.random.default_rng(7))
    assert (one == two).all() and (one != image).any()
    assert (one[..., 0] == one[..., 1]).mean() > 0.9  # grey but for what CLAHE rounds
    assert cv2.getNumThreads() == threads
