"""Blur, MedianBlur, ToGray and CLAHE of Albumentations, if installed, each with probability 0.01."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tessera.utils.machine.opencv import cv2

PROBABILITY = 0.01
_BLUR_SIDES = (3, 5, 7)  # pixels
_CLIP_LIMITS = (1.0, 4.0)  # of CLAHE

# Changes the colours of an image, uint8 (H, W, 3) RGB, in place; all randomness comes from the generator.
ColourFilter = Callable[[NDArray[np.uint8], np.random.Generator], None]


def no_filter(image: NDArray[np.uint8], rng: np.random.Generator) -> None:
    """Change nothing, and draw nothing from `rng`."""


def albumentations_filter(image: NDArray[np.uint8], rng: np.random.Generator) -> None:
    """Apply Blur, MedianBlur, ToGray and CLAHE in place, each with probability 0.01.

    The number of draws from `rng` is constant. Where Albumentations stores its random state differs between versions,
    so that every decision and parameter is drawn here. The package is imported when a filter first applies.
    """
    applied = rng.random(4) < PROBABILITY
    blur, median = (_BLUR_SIDES[i] for i in rng.integers(len(_BLUR_SIDES), size=2).tolist())
    clip_limit = float(rng.uniform(*_CLIP_LIMITS))
    if not applied.any():
        return
    threads = cv2.getNumThreads()
    import albumentations

    cv2.setNumThreads(threads)  # its import sets OpenCV's threads for the whole process
    makers = (
        lambda: albumentations.Blur(blur_limit=(blur, blur), p=1),
        lambda: albumentations.MedianBlur(blur_limit=(median, median), p=1),
        lambda: albumentations.ToGray(p=1),
        lambda: albumentations.CLAHE(clip_limit=(clip_limit, clip_limit), p=1),
    )
    for make, chosen in zip(makers, applied.tolist(), strict=True):
        if chosen:
            np.copyto(image, make()(image=image)["image"])


def open_filter() -> ColourFilter:
    """Return Albumentations' filters if the package is installed, else a filter that changes nothing."""
    return albumentations_filter if importlib.util.find_spec("albumentations") else no_filter
