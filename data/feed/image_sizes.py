"""Image sizes after resizing and padding, for training, validation, detection and export; and resizing itself.

Images keep their aspect ratio, and one side becomes that of the image size. Validation and detection shrink with area
averaging. They pad each side to a multiple of the stride, with at least half a stride of grey, so that the shape of an
image does not depend on its batch. `letterbox` of data/augment/pipeline.py centres the image.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from tessera.utils.errors import ConfigError
from tessera.utils.image_size import ImageSize, size_hw_of
from tessera.utils.machine.opencv import cv2

DEFAULT_OVERLAP = 0.2
_SMALLEST, _LARGEST, _MOST_OVERLAP = 32, 65536, 0.9


def fit_ratios(sizes_hw: NDArray[Any], imgsz: ImageSize) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return numerators and denominators (...) of the factors that resize images of `sizes_hw`, int (..., 2).

    They are the side of `imgsz` that an image reaches first, and this side of the image: for one number the longer one.
    """
    (most_h, most_w), sides = size_hw_of(imgsz), sizes_hw.astype(np.int64)
    height, width = sides[..., 0], sides[..., 1]
    by_height = most_h * width <= most_w * height
    return np.where(by_height, most_h, most_w), np.where(by_height, height, width)


def resized_sizes(sizes_hw: NDArray[Any], imgsz: ImageSize) -> NDArray[np.int64]:
    """Return height and width after loading, int64 (..., 2), at least 1.

    `sizes_hw` is int (..., 2), in pixels. Halves round to even. Integer arithmetic keeps ties exact, also in an
    exported graph.
    """
    to, of = (part[..., None] for part in fit_ratios(sizes_hw, imgsz))
    up, left = np.divmod(2 * sizes_hw.astype(np.int64) * to + of, 2 * of)
    return np.maximum(up - ((left == 0) & (up % 2 == 1)), 1)


def rect_train_shapes(sizes_hw: NDArray[np.int32], imgsz: ImageSize, stride: int) -> NDArray[np.int64]:
    """Return sizes (N, 2) after loading at `imgsz`, with sides rounded up to multiples of `stride`: int64 (N, 2)."""
    return -(-resized_sizes(sizes_hw, imgsz) // stride) * stride


def rect_val_shapes(sizes_hw: NDArray[Any], imgsz: ImageSize, stride: int) -> NDArray[np.int64]:
    """Return the padded validation shape of each image, int64 (N, 2), which depends on the image alone.

    Each side is ceil(side · factor / stride + 1/2) · stride, in integers, so that ties are exact.
    """
    to, of = (part[:, None] for part in fit_ratios(sizes_hw, imgsz))
    return -(-(2 * sizes_hw.astype(np.int64) * to + of * stride) // (2 * of * stride)) * stride


def resized(image: NDArray[np.uint8], size_hw: tuple[int, int], *, area: bool) -> NDArray[np.uint8]:
    """Resize an image, uint8 (h, w, 3), to (height, width); return it unchanged if it has that size.

    `area` averages pixels, for shrinking. Otherwise the interpolation is linear.
    """
    if image.shape[:2] == size_hw:
        return image
    interpolation = cv2.INTER_AREA if area else cv2.INTER_LINEAR
    return cast("NDArray[np.uint8]", cv2.resize(image, size_hw[::-1], interpolation=interpolation))


class Tile(NamedTuple):
    """A window of an image, in pixels; right and bottom are exclusive."""

    left: int
    top: int
    right: int
    bottom: int


def check_tiles(tile: int, overlap: float) -> None:
    """Raise ConfigError for a tile size or overlap out of range."""
    if not _SMALLEST <= tile <= _LARGEST:
        raise ConfigError(f"tile: found {tile}, allowed is {_SMALLEST} to {_LARGEST} pixels, or 0 for no tiles.")
    if not 0 <= overlap <= _MOST_OVERLAP:
        raise ConfigError(f"overlap: found {overlap:g}, allowed is 0 to {_MOST_OVERLAP:g}, a fraction of a tile.")


def tile_windows(size_hw: tuple[int, int], tile: int, overlap: float) -> list[Tile]:
    """Return the tiles of an image and, last, the whole image; only the whole image if it fits into one tile."""
    whole = Tile(0, 0, size_hw[1], size_hw[0])
    return [whole] if max(size_hw) <= tile else [*cut(size_hw, tile, overlap), whole]


def cut(size_hw: tuple[int, int], tile: int, overlap: float) -> list[Tile]:
    """Return the fewest tiles that cover an image, evenly spaced, row by row.

    A side shorter than `tile` pixels is not split. Adjacent tiles share at least the fraction `overlap` of a tile.
    """
    rows, columns = (_starts(side, tile, overlap) for side in size_hw)
    height, width = (min(side, tile) for side in size_hw)
    return [Tile(left, top, left + width, top + height) for top in rows for left in columns]


def _starts(side: int, tile: int, overlap: float) -> list[int]:
    if side <= tile:
        return [0]
    step = max(tile - math.ceil(overlap * tile), 1)
    count = math.ceil((side - tile) / step) + 1
    return [(side - tile) * place // (count - 1) for place in range(count)]
