"""The errors of a validation one by one, the most costly first.

What fixing all errors of a kind would gain in mAP50 is divided among them in proportion to how wrong the confidence of
each is: that is an error's cost. So costs of different kinds compare, and those of all errors of a kind add up to its
gain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tessera.utils.evaluation.matching import Kind, pairwise_iou
from tessera.utils.evaluation.tally import Errors
from tessera.utils.types import DatasetIndex

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class ErrorItem:
    """An error.

    Attributes:
        cost: of mAP50.
        kind: what it is.
        image: index of the image.
        predicted: class of the detection; None of a missed object.
        true: class of the object that it is about; None where a detection is about none.
        score: of the detection; of a missed object the highest of a detection below the confidence that is about it, 0
            without one.
        iou: of the two boxes; None where there are not two.
        box: of the detection, xyxy pixels of the original image.
        true_box: of the object.
        object: its row among the objects of the image; -1 without one.
    """

    cost: float
    kind: Kind
    image: int
    predicted: int | None
    true: int | None
    score: float
    iou: float | None
    box: Box | None
    true_box: Box | None
    object: int


def error_items(errors: Errors, gains: Mapping[Kind, float], index: DatasetIndex) -> list[ErrorItem]:
    """The errors that were kept, at most `MOST_ERRORS` of each kind: by cost, then by image, then by score.

    Args:
        errors: of a validation.
        gains: of mAP50 by kind.
        index: the split.
    """
    rows = errors.worst
    rates = np.zeros(len(Kind))
    for kind, gain in gains.items():
        rates[kind] = gain / max(errors.sizes[kind], 1e-9)
    costs = rates[rows.kinds] * rows.sizes
    order = np.lexsort((rows.places, rows.kinds, -rows.sizes, rows.images, -costs))
    items = []
    for row in order.tolist():
        kind, image, own = Kind(rows.kinds[row]), int(rows.images[row]), int(rows.objects[row])
        classes, boxes = index.labels(image)
        box = None if kind == Kind.MISSED else rows.boxes_xyxy[row]
        true_box = boxes[own] if own >= 0 else None
        iou = None
        if box is not None and true_box is not None:
            iou = float(pairwise_iou(box[None], true_box[None])[0, 0])
        items.append(
            ErrorItem(
                float(costs[row]),
                kind,
                image,
                None if box is None else int(rows.classes[row]),
                int(classes[own]) if own >= 0 else None,
                float(1 - rows.sizes[row] if kind == Kind.MISSED else rows.sizes[row]),
                iou,
                None if box is None else tuple(box.tolist()),
                None if true_box is None else tuple(true_box.tolist()),
                own,
            )
        )
    return items
