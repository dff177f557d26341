"""HSV colour jitter: multiplies hue, saturation and value of an image by given gains, in place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tessera.utils.machine.opencv import cv2
from tessera.utils.types import FILL

_STRIP = 80_000  # pixels at a time, whose planes stay in the processor's cache


class HsvJitter:
    """Multiplication of hue (modulo 180: OpenCV's unit is two degrees), saturation and value (up to 255) by gains."""

    def __init__(self, gains: tuple[float, float, float]) -> None:
        self.gains = gains
        self.grey = min(round(FILL * gains[2]), 255)  # the padding grey (FILL) after the jitter
        self._hues = (np.rint(np.arange(256) * gains[0]) % 180).astype(np.uint8)

    def __call__(self, image: NDArray[np.uint8]) -> None:
        """Change `image`, uint8 (H, W, 3) RGB, in place; rows need not be contiguous."""
        if self.gains == (1.0, 1.0, 1.0):
            return
        rows = max(_STRIP // image.shape[1], 1)
        for top in range(0, len(image), rows):
            self._change(image[top : top + rows])

    def _change(self, strip: NDArray[np.uint8]) -> None:
        hsv = cv2.cvtColor(strip, cv2.COLOR_RGB2HSV)
        hue, saturation, value = cv2.split(hsv)  # plane by plane is faster than all three channels together
        cv2.LUT(hue, self._hues, dst=hue)
        cv2.convertScaleAbs(saturation, dst=saturation, alpha=self.gains[1])
        cv2.convertScaleAbs(value, dst=value, alpha=self.gains[2])
        cv2.merge((hue, saturation, value), dst=hsv)
        cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, dst=strip)


NO_JITTER = HsvJitter((1.0, 1.0, 1.0))
