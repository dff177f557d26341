"""Checks of the outputs of exported files: a damaged or foreign file may compute anything.

Legend: B images, A rows of an image, C classes, n detections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.utils.checkpoints.archive import DamagedFile

_BEYOND = 1.0  # pixels beyond the image that rounding may cause
_ABOVE = 1e-3  # above a score of 1 that rounding may cause


def checked_rows(found: Any, images: int, classes: int) -> NDArray[np.float32]:
    """Return the rows of a bare network as float32 (B, A, 4 + C); raise DamagedFile for anything else."""
    rows = _numbers("rows", found)
    if rows.ndim != 3 or rows.shape[0] != images or rows.shape[2] != 4 + classes:
        raise DamagedFile(f"it computes rows of the shape {_shape(rows)}, expected ({images}, any, {4 + classes})")
    return rows.astype(np.float32, copy=False)


def checked_detections(
    found: Sequence[Any], classes: int, max_det: int, size_hw: tuple[int, int]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Return boxes (n, 4), scores (n,) and classes (n,) of an exported detector.

    Raises:
        DamagedFile: wrong shapes or types, more than `max_det` detections, boxes outside the image, unknown classes.
    """
    boxes, scores, kinds = (_numbers(*pair) for pair in zip(("boxes", "scores", "classes"), found, strict=True))
    count = scores.size
    if boxes.shape != (count, 4) or scores.ndim != 1 or kinds.shape != (count,):
        shapes = ", ".join(map(_shape, (boxes, scores, kinds)))
        raise DamagedFile(f"it computes boxes, scores and classes of the shapes {shapes}, expected (n, 4), (n,), (n,)")
    if count > max_det:
        raise DamagedFile(f"it computes {count:,} boxes, expected {max_det:,} at most")
    height, width = size_hw
    limits = np.array((width, height, width, height)) + _BEYOND
    if not ((boxes >= -_BEYOND) & (boxes <= limits)).all() or not (boxes[:, :2] <= boxes[:, 2:]).all():
        raise DamagedFile(f"it computes a box outside the image of {width} × {height} pixels")
    if len(odd := kinds[(kinds < 0) | (kinds >= classes) | (kinds != np.floor(kinds))]):
        raise DamagedFile(f"it computes the class {odd[0]:g}, expected 0 to {classes - 1}")
    if not ((scores >= 0) & (scores <= 1 + _ABOVE)).all():
        raise DamagedFile(f"it computes scores from {scores.min():g} to {scores.max():g}, expected 0 to 1")
    return boxes.astype(np.float32, copy=False), scores.astype(np.float32, copy=False), kinds.astype(np.int64)


def _numbers(what: str, found: Any) -> NDArray[Any]:
    values = np.asarray(found)
    if values.dtype.kind not in "fiu":
        raise DamagedFile(f"it computes {what} of {values.dtype}, expected numbers")
    # The extremes are NaN where one number is; this makes no copy.
    if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
        raise DamagedFile(f"it computes {what} with numbers that are not finite (NaN or infinite)")
    return values


def _shape(values: NDArray[Any]) -> str:
    return f"({', '.join(map(str, values.shape))})"
