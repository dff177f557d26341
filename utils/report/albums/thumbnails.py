"""Small copies of pictures as text for a page, within a budget of bytes and of pixels to decode."""

from __future__ import annotations

import base64
from pathlib import Path

from tessera.data.source.decode import REDUCTIONS, BadImage, image_size, read_image
from tessera.utils.errors import UserError
from tessera.utils.machine.opencv import cv2
from tessera.utils.pixels import PixelRule

SIDE = 200  # pixels of the long side
BYTES = 3_000_000  # of all copies, as text
DECODED = 400_000_000  # pixels of their files; where a decoder reduces them, it takes about that much less time
_QUALITY = 75


class Thumbnails:
    """Copies of pictures, each made once, until the budget is spent.

    Args:
        rule: for levels of more than 8 bits.
    """

    def __init__(self, rule: PixelRule | None) -> None:
        self._rule, self._bytes, self._pixels = rule, 0, 0
        self._made: dict[str, str] = {}

    def of(self, path: str) -> str:
        """A data address of the picture; "" where it cannot be read, or no room is left."""
        if path not in self._made:
            self._made[path] = self._make(Path(path)) if self._bytes < BYTES and self._pixels < DECODED else ""
            self._bytes += len(self._made[path])
        return self._made[path]

    def _make(self, path: Path) -> str:
        try:
            height, width = image_size(str(path), path.stat().st_size)
            reduction = next((by for by in REDUCTIONS if max(height, width) >= SIDE * by), 1)
            self._pixels += height * width // reduction
            picture = read_image(path, reduction, self._rule)
        except (BadImage, UserError, OSError):  # it is listed without a copy
            return ""
        factor = min(SIDE / max(picture.shape[:2]), 1)
        size = max(round(picture.shape[1] * factor), 1), max(round(picture.shape[0] * factor), 1)
        small = cv2.cvtColor(cv2.resize(picture, size, interpolation=cv2.INTER_AREA), cv2.COLOR_RGB2BGR)
        done, encoded = cv2.imencode(".jpg", small, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
        assert done, small.shape
        return f"data:image/jpeg;base64,{base64.b64encode(encoded.tobytes()).decode()}"
