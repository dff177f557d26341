"""ONNX graph of a resize that equals OpenCV's: INTER_AREA when shrinking, INTER_LINEAR when enlarging.

The Resize operator differs between runtimes in antialiasing, and from OpenCV in rounding. Here integers decide which
pixels contribute, so that every runtime computes the same.

Legend: B images, n sizes before, d sizes after, K pixels that contribute to one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tessera.deploy.exporting.graph import Nodes, Value

_MIN_COVERAGE = 1000  # OpenCV ignores at most 1/1000 of a pixel
_UNITS = 2048  # of OpenCV's weights when it enlarges


class Size(NamedTuple):
    """Height and width, int64 (1,) each."""

    height: Value
    width: Value


def shrink(g: Nodes, images: Value, before: Size, after: Size) -> Value:
    """Shrink uint8 (B, H, W, 3) to uint8 (B, 3, h, w) by area means.

    Where both ratios are whole, OpenCV adds the pixels and divides once. Half rounds to even, with 2×2 up. Otherwise
    it averages along the rows first. Here the columns are first: values within 1e-6 of a half may round differently.
    """
    ratio = Size(g.Div(before.height, after.height), g.Div(before.width, after.width))
    whole = g.And(
        g.Equal(g.Mul(ratio.height, after.height), before.height),
        g.Equal(g.Mul(ratio.width, after.width), before.width),
    )
    rows = g.Reshape(images, [0, 0, -1])
    rows = _averaged(g, rows, before.height, after.height, whole)
    pixels = g.Reshape(rows, g.Concat([0, 0], before.width, [3], axis=0))
    columns = g.Reshape(g.Transpose(pixels, perm=[0, 2, 3, 1]), g.Concat([0], before.width, [-1], axis=0))
    columns = _averaged(g, columns, before.width, after.width, whole)
    pixels = g.Reshape(columns, g.Concat([0, 0, 3], after.height, axis=0))
    area = g.cast(g.Mul(ratio.height, ratio.width), np.float32)
    two = g.And(g.Equal(ratio.height, [2]), g.Equal(ratio.width, [2]))
    factor = g.Where(whole, g.Div([1.0], area), [1.0])
    up = g.Where(g.And(whole, two), [0.125], [0.0])  # rounds halves up: 2×2 means are quarters of a level
    rounded = g.cast(g.Round(g.Add(g.Mul(pixels, factor), up)), np.uint8)
    return g.Transpose(rounded, perm=[0, 2, 3, 1])


def _averaged(g: Nodes, rows: Value, n: Value, d: Value, whole: Value) -> Value:
    """Average (B, n, m) to float32 (B, d, m) over equal parts of n; sum where `whole`."""
    part = _range(g, d)
    start, end = g.Mul(part, n), g.Mul(g.Add(part, [1]), n)  # in units of 1 / d
    first = g.Div(start, d)
    last = g.Div(g.Sub(end, [1]), d)
    count = g.Add(g.ReduceMax(g.Sub(last, first), keepdims=1), [1])
    source = g.Add(g.Unsqueeze(first, [1]), g.Unsqueeze(_range(g, count), [0]))  # (d, K)
    low = g.Max(g.Mul(source, d), g.Unsqueeze(start, [1]))
    high = g.Min(g.Mul(g.Add(source, [1]), d), g.Unsqueeze(end, [1]))
    covered = g.Max(g.Sub(high, low), [0])
    covered = g.Where(g.Greater(g.Mul(covered, [_MIN_COVERAGE]), d), covered, [0])
    weights = g.Div(g.cast(covered, np.float32), g.cast(g.Where(whole, d, n), np.float32))
    taken = g.cast(g.Gather(rows, g.Min(source, g.Sub(n, [1])), axis=1), np.float32)  # (B, d, K, m)
    return g.Squeeze(g.MatMul(g.Unsqueeze(weights, [1]), taken), [2])


def enlarge(g: Nodes, images: Value, before: Size, after: Size) -> Value:
    """Enlarge uint8 (B, H, W, 3) to uint8 (B, 3, h, w) linearly between pixel centres, in OpenCV's fixed point.

    Weights are multiples of 1/2048. The sum along a row loses 4 bits, its product with the column weight 16 bits, and
    the sum of both rows is rounded from quarters.
    """
    low, high, of_low, of_high = _neighbours(g, before.width, after.width, at_border=False)
    sides = []
    for index, weight in ((low, of_low), (high, of_high)):
        values = g.Reshape(g.cast(g.Gather(images, index, axis=2), np.float32), [0, 0, -1])
        sides.append(g.Mul(values, g.Reshape(g.Expand(g.Unsqueeze(weight, [1]), [1, 3]), [-1])))
    row = g.cast(g.Floor(g.Mul(g.Add(*sides), 1 / 16)), np.int32)  # (B, H, w · 3)
    low, high, of_low, of_high = _neighbours(g, before.height, after.height, at_border=True)
    parts = [
        g.Div(
            g.Mul(g.Gather(row, index, axis=1), g.Unsqueeze(g.cast(weight, np.int32), [1])), np.array(1 << 16, np.int32)
        )
        for index, weight in ((low, of_low), (high, of_high))
    ]
    total = g.Div(g.Add(g.Add(*parts), np.array(2, np.int32)), np.array(4, np.int32))
    pixels = g.Reshape(g.cast(total, np.uint8), g.Concat([0, 0], after.width, [3], axis=0))
    return g.Transpose(pixels, perm=[0, 3, 1, 2])


def _neighbours(g: Nodes, n: Value, d: Value, *, at_border: bool) -> tuple[Value, Value, Value, Value]:
    """Return the two neighbours of each of d pixels, int64 (d,), and their weights in 1/2048, float32 (d,).

    `at_border`: split the weight between two equal neighbours at the border too, as OpenCV does in columns.
    """
    centre = g.Sub(g.Mul(g.Add(g.Mul(_range(g, d), [2]), [1]), n), d)  # in units of 1 / 2d
    place = g.Div(g.cast(centre, np.float32), g.cast(g.Mul(d, [2]), np.float32))
    floor = g.Floor(place)
    fraction = g.Sub(place, floor)
    low = g.cast(floor, np.int64)
    end = g.Sub(n, [1])
    if not at_border:
        fraction = g.Where(g.Or(g.Less(low, [0]), g.GreaterOrEqual(low, end)), [0.0], fraction)
    indices = [g.Min(g.Max(index, [0]), end) for index in (low, g.Add(low, [1]))]
    weights = [g.Round(g.Mul(part, [float(_UNITS)])) for part in (g.Sub([1.0], fraction), fraction)]
    return indices[0], indices[1], weights[0], weights[1]


def _range(g: Nodes, end: Value) -> Value:
    """Return int64 0 … end − 1; `end` is int64 (1,)."""
    return g.Range(0, g.Squeeze(end, [0]), 1)
