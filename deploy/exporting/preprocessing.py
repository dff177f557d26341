"""ONNX graph of the preprocessing: resize, letterbox and scale, as in a validation.

The equals in Python are `resized_sizes` and `rect_val_shapes` of data/feed/image_sizes.py and `letterbox` of
data/augment/pipeline.py. Integers stay below 2^31 for sides up to 65,000 px: some runtimes compute int64 in 32 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tessera.deploy.exporting.graph import Nodes, Value
from tessera.deploy.exporting.resizing import Size, enlarge, shrink
from tessera.utils.types import FILL


class Letterboxed(NamedTuple):
    """Letterboxed images and their placement.

    images: float32 (B, 3, H', W') in 0 … 1; before, after: sizes before and after resizing; left, top: int64 (1,).
    """

    images: Value
    before: Size
    after: Size
    left: Value
    top: Value


def preprocess(g: Nodes, images: Value, imgsz: int, stride: int) -> Letterboxed:
    """Resize images of one size, uint8 (B, H, W, 3) RGB, to a long side of `imgsz` pixels, pad and scale them."""
    shape = g.Shape(images)
    before = Size(g.Slice(shape, [1], [2]), g.Slice(shape, [2], [3]))
    longest = g.Max(*before)
    after = Size(*(_loaded(g, side, longest, imgsz) for side in before))
    resized = g.if_else(
        g.Greater(longest, [imgsz]),
        lambda branch: shrink(branch, images, before, after),
        lambda branch: branch.if_else(
            branch.Less(longest, [imgsz]),
            lambda inner: enlarge(inner, images, before, after),
            lambda inner: inner.Transpose(images, perm=[0, 3, 1, 2]),
            dtype=np.uint8,
            axes=4,
        ),
        dtype=np.uint8,
        axes=4,
    )
    padded = Size(*(_padded(g, side, longest, imgsz, stride) for side in before))
    spare = Size(*(g.Sub(whole, side) for whole, side in zip(padded, after, strict=True)))
    top, left = (g.Div(side, [2]) for side in spare)
    margins = g.Concat([0, 0], top, left, [0, 0], g.Sub(spare.height, top), g.Sub(spare.width, left), axis=0)
    letterboxed = g.Pad(resized, margins, np.array(FILL, np.uint8))
    return Letterboxed(g.Div(g.cast(letterboxed, np.float32), 255.0), before, after, left, top)


def _loaded(g: Nodes, side: Value, longest: Value, imgsz: int) -> Value:
    """Return side · imgsz / longest, half to even, at least 1."""
    twice = g.Mul(longest, [2])
    scaled = g.Add(g.Mul(side, [2 * imgsz]), longest)
    up = g.Div(scaled, twice)
    is_half = g.Equal(g.Mul(up, twice), scaled)
    is_odd = g.Equal(g.Mod(up, [2]), [1])
    return g.Max(g.Sub(up, g.cast(g.And(is_half, is_odd), np.int64)), [1])


def _padded(g: Nodes, side: Value, longest: Value, imgsz: int, stride: int) -> Value:
    """Return ceil(side · imgsz / longest / stride + 1/2) · stride."""
    unit = g.Mul(longest, [stride])
    twice = g.Mul(unit, [2])
    cells = g.Div(g.Add(g.Mul(side, [2 * imgsz]), g.Sub(g.Mul(unit, [3]), [1])), twice)
    return g.Mul(cells, [stride])
