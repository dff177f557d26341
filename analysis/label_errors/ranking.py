"""Ranking of likely label errors, with a score from 0 to 1 that compares across kinds.

The score estimates how likely the detector is right to disagree, by how often it agrees with the other labels:

- trust in a detection is the precision at its confidence, scaled by that of its class;
- a label without support scores high where the detector detects nearly all labels of that class and size;
- a shifted label scores high where the others of its class fit well.

All of these are multiplied by mAP50: a detector that often errs disagrees with correct labels. The AP50 of each class
instead would rank planted errors lower. Duplicates rest on the labels alone.

Legend: R rows, C classes, B bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tessera.analysis.label_errors.evidence import (
    BINS,
    Counts,
    Evidence,
    LabelErrorKind,
    Rows,
    bins_of,
    sizes_of,
    steps_of,
)
from tessera.utils.types import DatasetIndex

MIN_SCORE = 0.1  # of a listed error
_WEIGHT = 10.0  # of the prior from all classes, in objects
_DOUBT = 4.0  # exponent of the fraction of better labels
_FAR, _CLOSE = 0.3, 0.1  # IoU from which on a label surely is about a detection, and up to which it is not

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class LabelError:
    """A label that is likely wrong.

    Attributes:
        image, object: dataset index, and row of the label among those of the image; -1 for a missing one.
        other: the label that a duplicate repeats; else -1.
        labelled, suggested: class of the label, None if missing; the class it should have, None if it should not exist.
        confidence: of the detection; for a spurious label that of the best detection about it, else 0.
        iou: of label and detection, or of two labels; else None.
        box, suggested_box: of the label, and where it should be; xyxy pixels of the original image, or None.
    """

    score: float
    kind: LabelErrorKind
    image: int
    object: int
    other: int
    labelled: int | None
    suggested: int | None
    confidence: float
    iou: float | None
    box: Box | None
    suggested_box: Box | None


def suspects(evidence: Evidence, index: DatasetIndex, map50: float) -> list[LabelError]:
    """Return likely label errors by descending score, at most one per label; `map50` is that of the detector."""
    rows = evidence.rows
    scores = _scores(rows, evidence.counts, index)
    scores = np.where(rows["kind"] == LabelErrorKind.DUPLICATE, scores, scores * map50).round(4)
    order = np.lexsort((*rows["box_xyxy"].T, rows["kind"], rows["object"], rows["image"], -scores))
    taken, listed = set[tuple[int, int]](), list[LabelError]()
    for row in order[scores[order] >= MIN_SCORE].tolist():
        place = int(rows["image"][row]), int(rows["object"][row])
        if place[1] < 0 or place not in taken:
            taken.add(place)
            listed.append(_suspect(rows[row], float(scores[row]), index))
    return listed


def _suspect(row: np.void, score: float, index: DatasetIndex) -> LabelError:
    kind, image, own = LabelErrorKind(row["kind"]), int(row["image"]), int(row["object"])
    classes, boxes = index.labels(image)
    goes = kind in (LabelErrorKind.SPURIOUS, LabelErrorKind.DUPLICATE)
    box = tuple(boxes[own].tolist()) if own >= 0 else None
    height, width = index.sizes_hw[image].tolist()
    found = tuple(row["box_xyxy"].clip(0, [width, height, width, height]).tolist())
    return LabelError(
        score,
        kind,
        image,
        own,
        int(row["other"]),
        int(classes[own]) if own >= 0 else None,
        None if goes else int(row["class"]),
        float(row["confidence"]),
        float(row["iou"]) if row["iou"] > 0 else None,
        box,
        None if goes else box if kind is LabelErrorKind.WRONG_CLASS else found,
    )


def _scores(rows: Rows, counts: Counts, index: DatasetIndex) -> NDArray[np.float64]:
    """Score each row, (R,)."""
    trust = _trust(counts)[rows["near"].astype(np.int64), rows["class"], bins_of(rows["confidence"])]
    sizes = sizes_of(rows["box_xyxy"], index.sizes_hw[rows["image"]])
    supported = _better(counts.supports)[rows["class"], sizes, steps_of(rows["confidence"])]
    others = counts.supports.sum((1, 2))[rows["class"]] - 1
    known = others / (others + _WEIGHT)  # of a class with few labels it is not known how many of them would be found
    placed = _better(counts.overlaps[:, None])[rows["class"], 0, bins_of(rows["iou"])]
    agrees = rows["support"] / np.maximum(rows["confidence"], 1e-6)
    reach = ((rows["iou"] - _CLOSE) / (_FAR - _CLOSE)).clip(0, 1) * ((1 - rows["iou"]) * 2).clip(0, 1)
    return np.select(
        [rows["kind"] == kind for kind in LabelErrorKind],
        [
            trust,
            (1 - trust) * supported**_DOUBT * known,
            trust * reach * placed**_DOUBT,
            trust * (1 - agrees).clip(0, 1),
            ((rows["iou"] - 0.5) / 0.4).clip(0, 1),
        ],
    ).astype(np.float64)


def _trust(counts: Counts) -> NDArray[np.float64]:
    """Estimate the precision of detections, (2, C, B) as `Counts.detections`; it rises with the confidence."""
    detections, correct = (table.sum(1) for table in (counts.detections, counts.correct))
    usual = np.stack([_rising((c + 1) / (n + 2), n + 2.0) for c, n in zip(correct, detections, strict=True)])
    sure = slice(BINS // 4, None)  # of the others nearly all are false
    expected = (counts.detections * usual[:, None])[..., sure].sum((0, 2))
    ratio = (counts.correct[..., sure].sum((0, 2)) + _WEIGHT) / (expected + _WEIGHT)
    trust: NDArray[np.float64] = (usual[:, None] * ratio[:, None]).clip(0, 1)
    return trust


def _rising(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fit values that never fall by weighted least squares: pool adjacent violators (Ayer et al. 1955)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            (a, w, n), (b, v, m) = pools[-2:]
            pools[-2:] = [((a * w + b * v) / (w + v), w + v, n + m)]
    return np.repeat([mean for mean, _, _ in pools], [length for _, _, length in pools])


def _better(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the fraction of other labels beyond each bin: (C, Z, B) of classes, sizes and bins, as the result.

    Few labels of a class and size are complemented by those of that size; few of these, by all labels.
    """
    worse: NDArray[np.float64] = np.zeros(counts.shape[-1])
    for part, weight in ((counts.sum((0, 1)), 0.0), (counts.sum(0), _WEIGHT), (counts, _WEIGHT)):
        up_to = part.cumsum(-1)  # one of them is the label itself
        worse = ((up_to - 1).clip(0) + weight * worse) / np.maximum((up_to[..., -1:] - 1).clip(0) + weight, 1)
    better: NDArray[np.float64] = (1 - worse).clip(0, 1)
    return better
