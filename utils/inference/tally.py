"""How many objects of which class were found on how many pictures, and how fast."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tessera.utils.text import counted, first_of


class Tally:
    """Counts and times of all pictures.

    Args:
        names: class names by index.

    Attributes:
        pictures: pictures and frames so far.
        per_class: int64 (nc,), detections of each class.
        failures: messages of the sources that could not be read, or not to the end.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.pictures = self._dropped = 0
        self.failures: list[str] = []
        self.per_class = np.zeros(len(names), np.int64)
        self._speed_ms, self._started = np.zeros(3), time.perf_counter()

    def add(self, classes: NDArray[np.int64], speed_ms: tuple[float, float, float], dropped: int = 0) -> None:
        """Count a picture, and the frames that were dropped before it."""
        self.pictures += 1
        self._dropped += dropped
        self.per_class += np.bincount(classes, minlength=len(self.per_class))
        self._speed_ms += speed_ms

    def lines(self, imgsz: int) -> list[str]:
        """What was found, and how fast."""
        order = np.argsort(-self.per_class, kind="stable")
        found = [f"{self.per_class[c]:,} {self._names[c]}" for c in order.tolist() if self.per_class[c]]
        lines = [f"{counted(self.pictures, 'picture')}: {first_of(found, 8) or 'nothing'}"]
        if self.pictures:
            preparation, inference, nms = self._speed_ms / self.pictures
            rate = self.pictures / (time.perf_counter() - self._started)
            lines.append(
                f"Speed: {preparation:.1f} ms preparation, {inference:.1f} ms inference, {nms:.1f} ms NMS per picture "
                f"at {imgsz} px; {rate:.1f} pictures a second with reading and writing"
            )
        if self._dropped:
            lines.append(
                f"{counted(self._dropped, 'frame')} of streams dropped for newer ones (--every-frame takes all)"
            )
        return lines
