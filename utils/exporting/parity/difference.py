"""Whether two pipelines find the same: their detections matched, and how far the matched ones are apart.

Legend: R detections of the reference, F of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.matching import pairwise_iou, to_host
from tessera.utils.types import Detections

_LEAST_IOU = 0.5  # of two boxes that can be the same


class Tolerance(NamedTuple):
    """How far a file may be from the network that it was made of.

    Attributes:
        box_px, score: the largest difference of a box's side, in pixels of the network's input, and of a score.
        typical_px, typical_score: the largest median of these differences.
        matched: least share of the detections, those near a threshold left out, that both find.
        margin: a score this close to a threshold may lie on either side of it.
        overlap: an IoU this close to the suppression's threshold may lie on either side; None = all differences count.
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
# What rounding of weights and features does to single detections; whether all of them are as good, mAP tells.
HALF = Tolerance(8.0, 0.1, 0.5, 0.01, 0.95, 0.03)
INT8 = Tolerance(320.0, 0.8, 4.0, 0.08, 0.6, 0.1)


class Difference(NamedTuple):
    """What was compared: detections of both away from thresholds, and how many of them have a partner.

    Attributes:
        boxes_px: differences of matched boxes, the largest of each one's sides, in pixels of the network's input.
        scores: differences of matched scores.
    """

    detections: int
    matched: int
    boxes_px: NDArray[np.float64]
    scores: NDArray[np.float64]

    @property
    def share(self) -> float:
        """Share of the detections that have a partner; 1 where there are none."""
        return self.matched / self.detections if self.detections else 1.0

    @property
    def largest(self) -> tuple[float, float]:
        """The largest differences: of a box's side in pixels, and of a score."""
        return float(self.boxes_px.max(initial=0)), float(self.scores.max(initial=0))

    def exceeds(self, allowed: Tolerance) -> str:
        """What is beyond a tolerance, in words; "" where nothing is. What is not a number is beyond each."""
        found, least = [], allowed.matched
        if self.share < least:
            found.append(f"{self.share:.1%} of the detections are found by both, at least {least:.0%} are meant")
        if self.matched:
            for what, unit, differences, most, typical in (
                ("boxes", " px", self.boxes_px, allowed.box_px, allowed.typical_px),
                ("scores", "", self.scores, allowed.score, allowed.typical_score),
            ):
                largest, middle = differences.max(), np.median(differences)
                if not largest <= most:
                    found.append(f"{what} differ by up to {largest:.3g}{unit}, at most {most:g} is allowed")
                if not middle <= typical:
                    more = f"half of the {what} differ by more than {middle:.3g}{unit}"
                    found.append(f"{more}, at most {typical:g} is allowed")
        return "; ".join(found)


def joined(parts: Sequence[Difference]) -> Difference:
    """Of several pictures together."""
    return Difference(
        sum(part.detections for part in parts),
        sum(part.matched for part in parts),
        np.concatenate([part.boxes_px for part in parts]),
        np.concatenate([part.scores for part in parts]),
    )


def compare(
    reference: Detections, found: Detections, *, conf: float, max_det: int, scale: float, margin: float
) -> Difference:
    """Match what both found on one picture.

    Args:
        reference, found: in pixels of the picture.
        conf, max_det: that both were asked for.
        scale: pixels of the network's input a pixel of the picture.
        margin: that scores may differ by.
    """
    mine, theirs = _pairs(reference, found, scale)
    alone = _alone(reference, mine, conf, max_det, margin) + _alone(found, theirs, conf, max_det, margin)
    boxes = to_host(reference.boxes_xyxy)[mine].astype(np.float64) - to_host(found.boxes_xyxy)[theirs]
    scores = to_host(reference.scores)[mine].astype(np.float64) - to_host(found.scores)[theirs]
    matched = len(mine) + len(theirs)
    return Difference(matched + alone, matched, np.abs(boxes).max(1, initial=0) * scale, np.abs(scores))


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
    partners: dict[int, int] = {}
    for row, column in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        if row not in partners and column not in partners.values():
            partners[row] = column
    return np.array([*partners], np.int64), np.array([*partners.values()], np.int64)


def _alone(found: Detections, partnered: NDArray[np.int64], conf: float, max_det: int, margin: float) -> int:
    """How many detections have no partner and need one.

    A score within `margin` of the confidence may be there or not; where as many were found as are allowed, so may one
    within `margin` of the last one's. Without a partner such a detection does not count; one that the thresholds should
    have cut does.
    """
    scores = to_host(found.scores)
    limit = max(conf, float(scores[max_det - 1])) if len(scores) >= max_det else conf
    should_be_cut = ~(scores >= conf - margin) | (np.arange(len(scores)) >= max_det)  # also where it is no number
    counts = (scores > limit + margin) | should_be_cut
    counts[partnered] = False
    return int(counts.sum())
