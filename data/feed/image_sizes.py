"""From a picture's size to what the model sees: the rule that training, validation, detection and exports share.

The long side becomes the image size, the short one follows. Validation and detection average pixels when they shrink,
and pad each side to a multiple of the stride, with half a stride of grey at least: a picture's shape is its own,
whatever is in the same batch. `letterbox` of data/augment/mosaic.py centres it there.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tessera.utils.machine.opencv import cv2


def loaded_sizes(sizes_hw: NDArray[Any], imgsz: int) -> NDArray[np.int64]:
    """Height and width after loading: the long side becomes `imgsz`, the short one is rounded, at least 1.

    Half rounds to even; in integers, so that ties are exact, in an exported graph too.

    Args:
        sizes_hw: int (..., 2), heights and widths of the files.
        imgsz: long side in pixels.

    Returns:
        int64 (..., 2).
    """
    sides = sizes_hw.astype(np.int64)
    twice = 2 * sides.max(axis=-1, keepdims=True)
    up, left = np.divmod(2 * sides * imgsz + twice // 2, twice)
    return np.maximum(up - ((left == 0) & (up % 2 == 1)), 1)


def padded_shapes(sizes_hw: NDArray[np.int32], imgsz: int, stride: int) -> NDArray[np.int64]:
    """Sizes (N, 2) after loading at `imgsz`, both sides rounded up to a multiple of `stride`: int64 (N, 2)."""
    return -(-loaded_sizes(sizes_hw, imgsz) // stride) * stride


def validation_shapes(sizes_hw: NDArray[Any], imgsz: int, stride: int) -> NDArray[np.int64]:
    """The shape each image is validated at, int64 (N, 2), a function of the image alone.

    Each side is ceil(side · imgsz / longest / stride + 1/2) · stride, in integers, so that ties are exact.
    """
    sides = sizes_hw.astype(np.int64)
    unit = sides.max(axis=1, keepdims=True) * stride
    return -(-(2 * sides * imgsz + unit) // (2 * unit)) * stride


def resized(image: NDArray[np.uint8], size_hw: tuple[int, int], *, area: bool) -> NDArray[np.uint8]:
    """An image at another size; the same one where it has that already.

    Args:
        image: uint8 (h, w, 3).
        size_hw: height and width in pixels.
        area: average pixels, for shrinking; else linear between pixels.
    """
    if image.shape[:2] == size_hw:
        return image
    interpolation = cv2.INTER_AREA if area else cv2.INTER_LINEAR
    return cast("NDArray[np.uint8]", cv2.resize(image, size_hw[::-1], interpolation=interpolation))
