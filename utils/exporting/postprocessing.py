"""From decoded predictions to detections, as nodes of an ONNX graph: models/nms.py in standard operators.

Legend: B pictures, A predictions of a picture, R of them that may pass, C classes, D detections.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tessera.utils.exporting.graph import Nodes, Value
from tessera.utils.exporting.preprocessing import Placed


class Limits(NamedTuple):
    """conf, iou: float32 (1,); max_det: int64 (1,). Without iou nothing is suppressed: a prediction is an object."""

    conf: Value
    iou: Value | None
    max_det: Value


class FoundValues(NamedTuple):
    """Detections of all pictures, descending by score.

    boxes: float32 (D, 4), x1, y1, x2, y2 in the network's pixels; scores: float32 (D,); classes: int64 (D,); pictures:
    int64 (D,), which one each is of.
    """

    boxes: Value
    scores: Value
    classes: Value
    pictures: Value


def detect(g: Nodes, decoded: Value, limits: Limits, *, has_objectness: bool) -> FoundValues:
    """What is found: every class above `conf` of every prediction, without those that a better one overlaps.

    Predictions are sorted out first by a score that none of their classes exceeds, and with them nearly all: the rest
    costs in proportion to what is left.

    Args:
        g: the nodes.
        decoded: float32 (B, A, 5 + C), cx, cy, w, h, objectness, class probabilities; or (B, A, 4 + C) without one.
        limits: thresholds; `max_det` is of each class of each picture.
        has_objectness: of decoded rows.
    """
    first_class = 5 if has_objectness else 4
    # No class probability exceeds 1.
    bound = _columns(g, decoded, 4, 5) if has_objectness else g.ReduceMax(_columns(g, decoded, 4), [2])
    best = g.ReduceMax(bound, [0, 2], keepdims=0)
    passing = g.Squeeze(g.NonZero(g.Greater(best, limits.conf)), [0])
    rows = g.Gather(decoded, passing, axis=1)
    scores = _columns(g, rows, first_class)
    if has_objectness:
        scores = g.Mul(scores, _columns(g, rows, 4, 5))
    centres, half = _columns(g, rows, 0, 2), g.Div(_columns(g, rows, 2, 4), 2.0)
    boxes = g.Concat(g.Sub(centres, half), g.Add(centres, half), axis=2)
    scores = g.Transpose(scores, perm=[0, 2, 1])
    if limits.iou is not None:
        chosen = g.NonMaxSuppression(boxes, scores, limits.max_det, limits.iou, limits.conf)
    else:
        chosen = g.Transpose(g.NonZero(g.Greater(scores, limits.conf)), perm=[1, 0])
    pictures, classes, places = (g.Squeeze(part, [1]) for part in g.Split(chosen, axis=1, num_outputs=3, outputs=3))
    _, of_classes, of_rows = g.Split(g.Shape(scores), axis=0, num_outputs=3, outputs=3)
    row = g.Add(g.Mul(pictures, of_classes), classes)
    values = g.Gather(g.Reshape(scores, [-1]), g.Add(g.Mul(row, of_rows), places))
    order = _descending(g, values)
    pictures, classes, places, values = (g.Gather(part, order) for part in (pictures, classes, places, values))
    boxes = g.Gather(g.Reshape(boxes, [-1, 4]), g.Add(g.Mul(pictures, of_rows), places))
    return FoundValues(boxes, values, classes, pictures)


def _descending(g: Nodes, values: Value) -> Value:
    """Places of float32 (D,), none below 0, from the largest on. One more is sorted with them: OpenCV sorts no 0."""
    more = g.Concat(values, [-1.0], axis=0)
    _, order = g.TopK(more, g.Shape(more), axis=0, outputs=2)
    return g.Slice(order, [0], g.Shape(values))


def of_one(g: Nodes, found: FoundValues, most: Value) -> FoundValues:
    """The best of a single picture."""
    return FoundValues(*(g.Slice(part, [0], most) for part in found))


def of_each(g: Nodes, found: FoundValues, most: Value, count: Value) -> tuple[Value, Value, Value, Value]:
    """The best of every picture, side by side; `most` of each, and `count`, B, are int64 (1,).

    Returns:
        Boxes (B, n, 4), scores (B, n) and classes (B, n), n as many as the picture with the most has; and counts, int64
        (B,), how many are a picture's own. Behind them boxes and scores are 0, classes −1.
    """
    numbers = g.Range(0, g.Squeeze(count, [0]), 1)
    owned = g.cast(g.Equal(g.Unsqueeze(found.pictures, [1]), g.Unsqueeze(numbers, [0])), np.int64)  # (D, B)
    place = g.Sub(g.ReduceSum(g.Mul(g.CumSum(owned, 0), owned), [1], keepdims=0), [1])
    kept = g.Squeeze(g.NonZero(g.Less(place, most)), [0])
    boxes, scores, classes, pictures = (g.Gather(part, kept, axis=0) for part in found)
    counts = g.Min(g.ReduceSum(owned, [0], keepdims=0), most)
    where = g.Concat(g.Unsqueeze(pictures, [1]), g.Unsqueeze(g.Gather(place, kept, axis=0), [1]), axis=1)
    shape = g.Concat(count, g.ReduceMax(counts, keepdims=1), axis=0)
    return (
        g.ScatterND(g.Expand(0.0, g.Concat(shape, [4], axis=0)), where, boxes),
        g.ScatterND(g.Expand(0.0, shape), where, scores),
        g.ScatterND(g.Expand(-1, shape), where, classes),
        counts,
    )


def in_pictures(g: Nodes, boxes: Value, placed: Placed) -> Value:
    """Boxes (D, 4) in pixels of the pictures, clipped to them (`undo_letterbox` of models/nms.py)."""
    size = g.Concat(placed.before.width, placed.before.height, axis=0)
    size = g.cast(g.Concat(size, size, axis=0), np.float32)
    after = g.Concat(placed.after.width, placed.after.height, axis=0)
    scale = g.Div(g.cast(g.Concat(after, after, axis=0), np.float32), size)
    corner = g.cast(g.Concat(placed.left, placed.top, placed.left, placed.top, axis=0), np.float32)
    return g.Min(g.Max(g.Div(g.Sub(boxes, corner), scale), 0.0), size)


def _columns(g: Nodes, rows: Value, start: int, end: int = 2**31 - 1) -> Value:
    """Part of the last of three dimensions."""
    return g.Slice(rows, [start], [end], [2])
