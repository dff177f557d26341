"""Resizing as nodes of an ONNX graph, equal to OpenCV's: INTER_AREA when shrinking, INTER_LINEAR when enlarging.

The Resize operator does not do: runtimes differ in its antialiasing, and none rounds as OpenCV does. What a resized
pixel is made of follows from whole numbers here, so that every runtime takes the same pixels with the same weights.

Legend: B pictures, n sizes before, d sizes after, K pixels that one is made of.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tessera.utils.exporting.graph import Nodes, Value

_LEAST_SHARE = 1000  # OpenCV leaves out what is at most 1/1000 of a pixel
_UNITS = 2048  # of OpenCV's weights when it enlarges


class Size(NamedTuple):
    """Height and width, int64 (1,) each."""

    height: Value
    width: Value


def shrink(g: Nodes, pictures: Value, before: Size, after: Size) -> Value:
    """uint8 (B, H, W, 3) to uint8 (B, 3, h, w), the mean of what lies under each pixel; no side grows.

    Where both ratios are whole, OpenCV adds the pixels and divides once; half rounds to even, but with 2×2 it rounds
    up. Else it weighs them first along the rows, then along the columns; here it is the other way around, so that
    values which lie a millionth beside a half may round otherwise.
    """
    ratio = Size(g.Div(before.height, after.height), g.Div(before.width, after.width))
    whole = g.And(
        g.Equal(g.Mul(ratio.height, after.height), before.height),
        g.Equal(g.Mul(ratio.width, after.width), before.width),
    )
    rows = g.Reshape(pictures, [0, 0, -1])
    rows = _averaged(g, rows, before.height, after.height, whole)
    pixels = g.Reshape(rows, g.Concat([0, 0], before.width, [3], axis=0))
    columns = g.Reshape(g.Transpose(pixels, perm=[0, 2, 3, 1]), g.Concat([0], before.width, [-1], axis=0))
    columns = _averaged(g, columns, before.width, after.width, whole)
    pixels = g.Reshape(columns, g.Concat([0, 0, 3], after.height, axis=0))
    area = g.cast(g.Mul(ratio.height, ratio.width), np.float32)
    two = g.And(g.Equal(ratio.height, [2]), g.Equal(ratio.width, [2]))
    factor = g.Where(whole, g.Div([1.0], area), [1.0])
    up = g.Where(g.And(whole, two), [0.125], [0.0])  # quarters of a level: a half more than that
    rounded = g.cast(g.Round(g.Add(g.Mul(pixels, factor), up)), np.uint8)
    return g.Transpose(rounded, perm=[0, 2, 3, 1])


def _averaged(g: Nodes, rows: Value, n: Value, d: Value, whole: Value) -> Value:
    """(B, n, m) to float32 (B, d, m): means over equal parts of n; where `whole`, sums."""
    part = _range(g, d)
    start, end = g.Mul(part, n), g.Mul(g.Add(part, [1]), n)  # in units of 1 / d
    first = g.Div(start, d)
    last = g.Div(g.Sub(end, [1]), d)
    count = g.Add(g.ReduceMax(g.Sub(last, first), keepdims=1), [1])
    source = g.Add(g.Unsqueeze(first, [1]), g.Unsqueeze(_range(g, count), [0]))  # (d, K)
    low = g.Max(g.Mul(source, d), g.Unsqueeze(start, [1]))
    high = g.Min(g.Mul(g.Add(source, [1]), d), g.Unsqueeze(end, [1]))
    covered = g.Max(g.Sub(high, low), [0])
    covered = g.Where(g.Greater(g.Mul(covered, [_LEAST_SHARE]), d), covered, [0])
    weights = g.Div(g.cast(covered, np.float32), g.cast(g.Where(whole, d, n), np.float32))
    taken = g.cast(g.Gather(rows, g.Min(source, g.Sub(n, [1])), axis=1), np.float32)  # (B, d, K, m)
    return g.Squeeze(g.MatMul(g.Unsqueeze(weights, [1]), taken), [2])


def enlarge(g: Nodes, pictures: Value, before: Size, after: Size) -> Value:
    """uint8 (B, H, W, 3) to uint8 (B, 3, h, w), linear between the centres of pixels; in OpenCV's fixed-point numbers.

    Along the rows weights are 1/2048. That sum loses its last four bits, is multiplied with the weights of the columns,
    loses 16 bits, and the sum of both rows is rounded from quarters.
    """
    low, high, of_low, of_high = _neighbours(g, before.width, after.width, at_border=False)
    sides = []
    for index, weight in ((low, of_low), (high, of_high)):
        values = g.Reshape(g.cast(g.Gather(pictures, index, axis=2), np.float32), [0, 0, -1])
        sides.append(g.Mul(values, g.Reshape(g.Expand(g.Unsqueeze(weight, [1]), [1, 3]), [-1])))
    row = g.cast(g.Floor(g.Mul(g.Add(*sides), 1 / 16)), np.int32)  # (B, H, w · 3)
    low, high, of_low, of_high = _neighbours(g, before.height, after.height, at_border=True)
    parts = [
        g.Div(
            g.Mul(g.Gather(row, index, axis=1), g.Unsqueeze(g.cast(weight, np.int32), [1])),
            np.array(1 << 16, np.int32),
        )
        for index, weight in ((low, of_low), (high, of_high))
    ]
    total = g.Div(g.Add(g.Add(*parts), np.array(2, np.int32)), np.array(4, np.int32))
    pixels = g.Reshape(g.cast(total, np.uint8), g.Concat([0, 0], after.width, [3], axis=0))
    return g.Transpose(pixels, perm=[0, 3, 1, 2])


def _neighbours(g: Nodes, n: Value, d: Value, *, at_border: bool) -> tuple[Value, Value, Value, Value]:
    """The two pixels that each of d lies between, int64 (d,), and their weights in units of 1/2048, float32 (d,).

    Args:
        g: the nodes.
        n, d: sizes.
        at_border: split the weight beside the border too, where both are the pixel at the border, as OpenCV does in
            columns: both parts are rounded.
    """
    centre = g.Sub(g.Mul(g.Add(g.Mul(_range(g, d), [2]), [1]), n), d)  # in units of 1 / 2d
    place = g.Div(g.cast(centre, np.float32), g.cast(g.Mul(d, [2]), np.float32))
    floor = g.Floor(place)
    share = g.Sub(place, floor)
    low = g.cast(floor, np.int64)
    end = g.Sub(n, [1])
    if not at_border:
        share = g.Where(g.Or(g.Less(low, [0]), g.GreaterOrEqual(low, end)), [0.0], share)
    indices = [g.Min(g.Max(index, [0]), end) for index in (low, g.Add(low, [1]))]
    weights = [g.Round(g.Mul(part, [float(_UNITS)])) for part in (g.Sub([1.0], share), share)]
    return indices[0], indices[1], weights[0], weights[1]


def _range(g: Nodes, end: Value) -> Value:
    """int64 0 … end − 1 of an int64 (1,)."""
    return g.Range(0, g.Squeeze(end, [0]), 1)
