"""Rare colour filters of Albumentations, where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.utils.environment import forbid_update_checks
from tessera.utils.machine.opencv import cv2

PROBABILITY = 0.01
_BLUR_SIDES = (3, 5, 7)  # pixels
_CLIP_LIMITS = (1.0, 4.0)  # of CLAHE


# Changes the colours of a picture, uint8 (H, W, 3) RGB, in place; all randomness comes from the generator.
ColourFilter = Callable[[NDArray[np.uint8], np.random.Generator], None]


def no_filter(image: NDArray[np.uint8], rng: np.random.Generator) -> None:
    """Change nothing, and take nothing from `rng`."""


class AlbumentationsFilter:
    """Blur, MedianBlur, ToGray and CLAHE, each with probability 0.01.

    Albumentations keeps its random state in another place in each version. Here every decision and parameter is
    taken from the sample's generator, and transforms are built with these for one use, so that there is nothing left to
    seed. The object holds no state and travels to workers; the package is imported when a filter first applies.
    """

    def __call__(self, image: NDArray[np.uint8], rng: np.random.Generator) -> None:
        """Filter `image`, uint8 (H, W, 3) RGB, in place; takes always as many numbers from `rng`."""
        applied = rng.random(4) < PROBABILITY
        blur, median = (_BLUR_SIDES[i] for i in rng.integers(len(_BLUR_SIDES), size=2).tolist())
        clip_limit = float(rng.uniform(*_CLIP_LIMITS))
        if not applied.any():
            return
        for transform in self._transforms(applied.tolist(), blur, median, clip_limit):
            np.copyto(image, transform(image=image)["image"])

    @staticmethod
    def _transforms(applied: list[bool], blur: int, median: int, clip_limit: float) -> list[Any]:
        forbid_update_checks()
        threads = cv2.getNumThreads()
        import albumentations

        makers = (
            lambda: albumentations.Blur(blur_limit=(blur, blur), p=1),
            lambda: albumentations.MedianBlur(blur_limit=(median, median), p=1),
            lambda: albumentations.ToGray(p=1),
            lambda: albumentations.CLAHE(clip_limit=(clip_limit, clip_limit), p=1),
        )
        cv2.setNumThreads(threads)  # its import sets OpenCV's threads for the whole process
        return [make() for make, chosen in zip(makers, applied, strict=True) if chosen]


def open_filter() -> ColourFilter:
    """Albumentations' filters where the package is installed, else one that changes nothing."""
    return AlbumentationsFilter() if importlib.util.find_spec("albumentations") else no_filter
