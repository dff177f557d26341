"""Whether two pipelines find the same: their detections matched, and how far the matched ones are apart.

Legend: R detections of the reference, F of the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.matching import pairwise_iou, to_host
from tessera.utils.types import Detections

_LEAST_IOU = 0.5  # of two boxes that can be the same
_NONE: NDArray[np.float64] = np.zeros(0)


class Tolerance(NamedTuple):
    """How far a file may be from the network that it was made of.

    Attributes:
        box_px, score: the largest difference of a box's side, in pixels of the network's input, and of a score.
        typical_px, typical_score: half of the differences are below.
        matched: least share of the detections away from thresholds that both find.
        margin: how close to a threshold a score may be on either side of it.
        overlap: how far beyond a suppression's threshold the IoU of two boxes may be, for its choice between them to be
            a matter of rounding; None = every difference counts.
    """

    box_px: float
    score: float
    typical_px: float
    typical_score: float
    matched: float
    margin: float
    overlap: float | None = None


# A resize that rounds a few pixels the other way moves few boxes, and those little; a shift moves all of them.
EXACT = Tolerance(0.5, 0.02, 0.01, 1e-4, 0.98, 2e-3, overlap=0.005)
# What rounding of weights and features does to single detections; that all of them are as good is mAP's to tell.
HALF = Tolerance(8.0, 0.1, 0.5, 0.01, 0.95, 0.03)
INT8 = Tolerance(320.0, 0.8, 4.0, 0.08, 0.6, 0.1)


class Agreement(NamedTuple):
    """What was compared.

    Attributes:
        detections: of both, away from thresholds.
        matched: of them, that have a partner.
        boxes_px: differences of matched boxes, the largest of each one's sides, in pixels of the network's input.
        scores: differences of matched scores.
    """

    detections: int = 0
    matched: int = 0
    boxes_px: NDArray[np.float64] = _NONE
    scores: NDArray[np.float64] = _NONE

    @property
    def share(self) -> float:
        """Share of the detections that have a partner; 1 where there are none."""
        return self.matched / self.detections if self.detections else 1.0

    @property
    def box_px(self) -> float:
        """The largest difference of a box's side."""
        return float(self.boxes_px.max(initial=0))

    @property
    def score(self) -> float:
        """The largest difference of a score."""
        return float(self.scores.max(initial=0))

    def exceeds(self, allowed: Tolerance) -> str:
        """What is beyond a tolerance, in words; "" where nothing is. What is not a number is beyond each."""
        found = []
        if self.share < allowed.matched:
            found.append(
                f"{self.share:.1%} of the detections are found by both, at least {allowed.matched:.0%} are meant"
            )
        kinds = (
            ("boxes differ by {} px", self.boxes_px, allowed.box_px, allowed.typical_px),
            ("scores differ by {}", self.scores, allowed.score, allowed.typical_score),
        )
        for words, differences, most, typical in kinds:
            if len(differences) and not (largest := differences.max()) <= most:
                found.append(f"{words.format(f'up to {largest:.3g}')}, at most {most:g} is allowed")
            if len(differences) and not (middle := np.median(differences)) <= typical:
                found.append(f"half of the {words.format(f'more than {middle:.3g}')}, at most {typical:g} is allowed")
        return "; ".join(found)


def joined(parts: Iterable[Agreement]) -> Agreement:
    """Of several pictures together."""
    parts = list(parts)
    return Agreement(
        sum(part.detections for part in parts),
        sum(part.matched for part in parts),
        np.concatenate([_NONE, *(part.boxes_px for part in parts)]),
        np.concatenate([_NONE, *(part.scores for part in parts)]),
    )


def compare(
    reference: Detections, found: Detections, *, conf: float, max_det: int, scale: float, margin: float
) -> Agreement:
    """Match what both found on one picture.

    A detection whose score is within `margin` of a threshold may be there or not: of the confidence, and, where as many
    were found as are allowed, of the last one's score. It is matched where it has a partner, and does not count where
    it has none.

    Args:
        reference, found: in pixels of the picture.
        conf, max_det: that both were asked for.
        scale: pixels of the network's input a pixel of the picture.
        margin: that scores may differ by.
    """
    partners = _pairs(reference, found, scale)
    sides = (reference, found)
    counts = [
        int((_clear(one, conf, max_det, margin) & ~_taken(len(one), rows)).sum())
        for one, rows in zip(sides, partners, strict=True)
    ]
    matched = 2 * len(partners[0])
    boxes = [to_host(one.boxes_xyxy)[rows] for one, rows in zip(sides, partners, strict=True)]
    scores = [to_host(one.scores)[rows] for one, rows in zip(sides, partners, strict=True)]
    return Agreement(
        matched + sum(counts),
        matched,
        np.abs(boxes[0].astype(np.float64) - boxes[1]).max(1, initial=0) * scale,
        np.abs(scores[0].astype(np.float64) - scores[1]),
    )


def _pairs(reference: Detections, found: Detections, scale: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the detections that are the same: of one class, the closest first, then by overlap; each once.

    At the border of a picture boxes may be without any area, and overlap nothing.
    """
    same = to_host(reference.classes)[:, None] == to_host(found.classes)
    apart = np.abs(to_host(reference.boxes_xyxy)[:, None] - to_host(found.boxes_xyxy)).max(2, initial=0) * scale
    iou = pairwise_iou(reference.boxes_xyxy, found.boxes_xyxy)
    likeness = np.where(apart < 1, 2 - apart, iou) * same
    rows, columns = np.nonzero(likeness >= _LEAST_IOU)
    order = np.argsort(-likeness[rows, columns], kind="stable")
    free_rows, free_columns = np.ones(len(reference), bool), np.ones(len(found), bool)
    pairs: list[tuple[int, int]] = []
    for row, column in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        if free_rows[row] and free_columns[column]:
            free_rows[row] = free_columns[column] = False
            pairs.append((row, column))
    array = np.array(pairs, np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _clear(found: Detections, conf: float, max_det: int, margin: float) -> NDArray[np.bool_]:
    """Which detections need a partner: no rounding made them, or they break a rule (`conf`, `max_det`)."""
    scores = to_host(found.scores)
    limit = max(conf, float(scores[max_det - 1])) if len(scores) >= max_det else conf
    surplus = ~(scores >= conf - margin) | (np.arange(len(scores)) >= max_det)  # the first also where it is no number
    return np.asarray((scores > limit + margin) | surplus)


def _taken(count: int, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    taken = np.zeros(count, bool)
    taken[rows] = True
    return taken
