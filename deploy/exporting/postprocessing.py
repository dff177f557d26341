"""ONNX graph of the postprocessing: confidence thresholds and NMS, as models/nms.py.

Legend: B images, A predictions of an image, C classes, D detections.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tessera.deploy.exporting.graph import Nodes, Value
from tessera.deploy.exporting.preprocessing import Letterboxed


class Limits(NamedTuple):
    """Thresholds: conf, iou float32 (1,), max_det int64 (1,); without iou there is no NMS."""

    conf: Value
    iou: Value | None
    max_det: Value


class DetectionValues(NamedTuple):
    """Detections of all images, descending by score.

    boxes: float32 (D, 4), xyxy in the network's pixels; scores: float32 (D,); classes, images: int64 (D,), the class
    and the image of each.
    """

    boxes: Value
    scores: Value
    classes: Value
    images: Value


def detect(g: Nodes, decoded: Value, limits: Limits, *, has_objectness: bool) -> DetectionValues:
    """Return every class above `conf` of every prediction, after NMS.

    Most predictions are removed first, by an upper bound of their scores, which makes the rest cheap.

    `decoded` is float32 (B, A, 5 + C), cx, cy, w, h, objectness, class probabilities; or (B, A, 4 + C) without
    objectness. `max_det` applies to each class of each image here.
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
    images, classes, places = (g.Squeeze(part, [1]) for part in g.Split(chosen, axis=1, num_outputs=3, outputs=3))
    _, of_classes, of_rows = g.Split(g.Shape(scores), axis=0, num_outputs=3, outputs=3)
    row = g.Add(g.Mul(images, of_classes), classes)
    values = g.Gather(g.Reshape(scores, [-1]), g.Add(g.Mul(row, of_rows), places))
    more = g.Concat(values, [-1.0], axis=0)  # a sentinel, as OpenCV cannot sort nothing
    _, order = g.TopK(more, g.Shape(more), axis=0, outputs=2)
    order = g.Slice(order, [0], g.Shape(values))
    images, classes, places, values = (g.Gather(part, order) for part in (images, classes, places, values))
    boxes = g.Gather(g.Reshape(boxes, [-1, 4]), g.Add(g.Mul(images, of_rows), places))
    return DetectionValues(boxes, values, classes, images)


def single_detections(g: Nodes, found: DetectionValues, most: Value) -> DetectionValues:
    """Return the best detections of a single image."""
    return DetectionValues(*(g.Slice(part, [0], most) for part in found))


def batch_detections(g: Nodes, found: DetectionValues, most: Value, count: Value) -> tuple[Value, Value, Value, Value]:
    """Return the best detections of each image in a batch; `most` and the batch size `count` are int64 (1,).

    Returns:
        Boxes (B, n, 4), scores (B, n), classes (B, n) and counts, int64 (B,), of the detections of each image. Rows
        beyond the count are padding: boxes and scores 0, classes −1.
    """
    numbers = g.Range(0, g.Squeeze(count, [0]), 1)
    owned = g.cast(g.Equal(g.Unsqueeze(found.images, [1]), g.Unsqueeze(numbers, [0])), np.int64)  # (D, B)
    place = g.Sub(g.ReduceSum(g.Mul(g.CumSum(owned, 0), owned), [1], keepdims=0), [1])
    passing = g.Squeeze(g.NonZero(g.Less(place, most)), [0])
    boxes, scores, classes, images = (g.Gather(part, passing, axis=0) for part in found)
    counts = g.Min(g.ReduceSum(owned, [0], keepdims=0), most)
    where = g.Concat(g.Unsqueeze(images, [1]), g.Unsqueeze(g.Gather(place, passing, axis=0), [1]), axis=1)
    shape = g.Concat(count, g.ReduceMax(counts, keepdims=1), axis=0)
    return (
        g.ScatterND(g.Expand(0.0, g.Concat(shape, [4], axis=0)), where, boxes),
        g.ScatterND(g.Expand(0.0, shape), where, scores),
        g.ScatterND(g.Expand(-1, shape), where, classes),
        counts,
    )


def to_image_pixels(g: Nodes, boxes: Value, placed: Letterboxed) -> Value:
    """Return boxes (D, 4) in pixels of the images, clipped to them, as `undo_letterbox` of models/nms.py."""
    size = g.Concat(placed.before.width, placed.before.height, axis=0)
    size = g.cast(g.Concat(size, size, axis=0), np.float32)
    after = g.Concat(placed.after.width, placed.after.height, axis=0)
    scale = g.Div(g.cast(g.Concat(after, after, axis=0), np.float32), size)
    corner = g.cast(g.Concat(placed.left, placed.top, placed.left, placed.top, axis=0), np.float32)
    return g.Min(g.Max(g.Div(g.Sub(boxes, corner), scale), 0.0), size)


def _columns(g: Nodes, rows: Value, start: int, end: int = 2**31 - 1) -> Value:
    return g.Slice(rows, [start], [end], [2])
