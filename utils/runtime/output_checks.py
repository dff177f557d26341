"""What an exported file computes, checked: another program's file, or a damaged one, may answer with anything.

Legend: B images, A rows of an image, C classes, n detections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.utils.checkpoints.restricted_unpickler import Damaged

_BEYOND = 1.0  # pixels that rounding may put a box beyond its picture
_ABOVE = 1e-3  # that rounding may put a score above 1


def checked_rows(found: Any, images: int, classes: int) -> NDArray[np.float32]:
    """Rows of a bare network, float32 (B, A, 4 + C), of what its runtime gave.

    Raises:
        Damaged: another shape, no numbers, or some that are not finite.
    """
    rows = _numbers("rows", found)
    if rows.ndim != 3 or rows.shape[0] != images or rows.shape[2] != 4 + classes:
        raise Damaged(f"it finds rows of the shape {_shape(rows)}, expected ({images}, any, {4 + classes})")
    return rows.astype(np.float32, copy=False)


def checked_detections(
    found: Sequence[Any], classes: int, max_det: int, size_hw: tuple[int, int]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """What a whole detector found on a picture: boxes (n, 4), scores (n,) and classes (n,).

    Args:
        found: as its runtime gave them.
        classes: that it knows.
        max_det: detections that were asked for at most.
        size_hw: of the picture.

    Raises:
        Damaged: other shapes or numbers, too many detections, boxes beyond the picture, nameless classes.
    """
    boxes, scores, kinds = (_numbers(*pair) for pair in zip(("boxes", "scores", "classes"), found, strict=True))
    count = scores.size
    if boxes.shape != (count, 4) or scores.ndim != 1 or kinds.shape != (count,):
        shapes = ", ".join(map(_shape, (boxes, scores, kinds)))
        raise Damaged(f"it finds boxes, scores and classes of the shapes {shapes}, expected (n, 4), (n,), (n,)")
    if count > max_det:
        raise Damaged(f"it finds {count:,} boxes, expected {max_det:,} at most")
    height, width = size_hw
    limits = np.array((width, height, width, height)) + _BEYOND
    if not ((boxes >= -_BEYOND) & (boxes <= limits)).all() or not (boxes[:, :2] <= boxes[:, 2:]).all():
        raise Damaged(f"it finds a box that does not lie in the picture of {width} × {height} pixels")
    if len(odd := kinds[(kinds < 0) | (kinds >= classes) | (kinds != np.floor(kinds))]):
        raise Damaged(f"it finds the class {odd[0]:g}, expected 0 to {classes - 1}")
    if not ((scores >= 0) & (scores <= 1 + _ABOVE)).all():
        raise Damaged(f"it finds scores from {scores.min():g} to {scores.max():g}, expected 0 to 1")
    return boxes.astype(np.float32, copy=False), scores.astype(np.float32, copy=False), kinds.astype(np.int64)


def _numbers(what: str, found: Any) -> NDArray[Any]:
    """An array of finite numbers."""
    values = np.asarray(found)
    if values.dtype.kind not in "fiu":
        raise Damaged(f"it finds {what} of {values.dtype}, expected numbers")
    # The extremes are NaN where one number is: two passes, without a copy.
    if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
        raise Damaged(f"it finds {what} with numbers that are not finite (NaN or infinite)")
    return values


def _shape(values: NDArray[Any]) -> str:
    return f"({', '.join(map(str, values.shape))})"
