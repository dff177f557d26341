"""Colours of a training image, changed in place: HSV jitter, and four filters of Albumentations if it is installed.

Images are uint8 (H, W, 3) RGB.
"""

from __future__ import annotations

import importlib.util

import numpy as np
from numpy.typing import NDArray

from tessera.utils.machine.opencv import cv2
from tessera.utils.types import FILL

Gains = tuple[float, float, float]  # factors of hue, saturation and value
NO_JITTER: Gains = (1.0, 1.0, 1.0)
_STRIP = 80_000  # pixels at a time, whose planes stay in the processor's cache

HAS_ALBUMENTATIONS = importlib.util.find_spec("albumentations") is not None
PROBABILITY = 0.01  # of each filter
_BLUR_SIDES = (3, 5, 7)  # pixels
_CLIP_LIMITS = (1.0, 4.0)  # of CLAHE


def jitter_hsv(image: NDArray[np.uint8], gains: Gains) -> None:
    """Multiply hue (modulo 180: OpenCV's unit is two degrees), saturation and value; rows need not be contiguous."""
    if gains == NO_JITTER:
        return
    hues = (np.rint(np.arange(256) * gains[0]) % 180).astype(np.uint8)
    rows = max(_STRIP // image.shape[1], 1)
    for top in range(0, len(image), rows):
        strip = image[top : top + rows]
        hsv = cv2.cvtColor(strip, cv2.COLOR_RGB2HSV)
        hue, saturation, value = cv2.split(hsv)  # plane by plane is faster than all three channels together
        cv2.LUT(hue, hues, dst=hue)
        cv2.convertScaleAbs(saturation, dst=saturation, alpha=gains[1])
        cv2.convertScaleAbs(value, dst=value, alpha=gains[2])
        cv2.merge((hue, saturation, value), dst=hsv)
        cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, dst=strip)


def jittered_fill(gains: Gains) -> int:
    """Return what the padding grey becomes."""
    return min(round(FILL * gains[2]), 255)


def filter_colours(image: NDArray[np.uint8], rng: np.random.Generator) -> None:
    """Apply Blur, MedianBlur, ToGray and CLAHE of Albumentations, each with probability 0.01.

    The number of draws from `rng` is constant, 0 without the package. Where Albumentations stores its random state
    differs between versions, so that every decision and parameter is drawn here.
    """
    if not HAS_ALBUMENTATIONS:
        return
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
