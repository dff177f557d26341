"""Comparison of the detections of two pipelines: matching, differences and tolerances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.matching import pairwise_iou, to_host
from tessera.utils.types import Detections

_MIN_IOU = 0.5  # of two boxes that match


class Tolerance(NamedTuple):
    """Allowed differences between an exported file and its network."""

    box_px: float  # largest difference of a box side in pixels of the network input
    score: float  # and of a score
    typical_px: float  # largest medians of these differences
    typical_score: float
    matched: float  # smallest fraction of matched detections, without those near a threshold
    margin: float  # a score this close to a threshold may lie on either side of it
    # An IoU this close to the NMS threshold may lie on either side; None = NMS ties count as differences.
    overlap: float | None = None


# Pixels that round differently move few boxes a little; a shift moves all of them.
EXACT = Tolerance(0.5, 0.02, 0.01, 1e-4, 0.98, 2e-3, overlap=0.005)
# Rounded weights and features change single detections; mAP tells whether they are worse.
HALF = Tolerance(8.0, 0.1, 0.5, 0.01, 0.95, 0.03)
INT8 = Tolerance(320.0, 0.8, 4.0, 0.08, 0.6, 0.1)


class Difference(NamedTuple):
    """Differences between the detections of two pipelines.

    Attributes:
        detections, matched: of both together, without those near a threshold.
        boxes_px: largest side difference of each matched box in pixels of the network input.
        scores: differences of matched scores.
    """

    detections: int
    matched: int
    boxes_px: NDArray[np.float64]
    scores: NDArray[np.float64]

    @property
    def matched_fraction(self) -> float:
        """Fraction of matched detections; 1 where there are none."""
        return self.matched / self.detections if self.detections else 1.0

    @property
    def largest(self) -> tuple[float, float]:
        """Largest differences of a box side in pixels and of a score."""
        return float(self.boxes_px.max(initial=0)), float(self.scores.max(initial=0))

    def exceeds(self, allowed: Tolerance) -> str:
        """Describe what exceeds a tolerance, NaN included; "" = nothing."""
        found, least = [], allowed.matched
        if self.matched_fraction < least:
            found.append(f"{self.matched_fraction:.1%} of the detections match, expected at least {least:.0%}")
        if self.matched:
            for what, unit, differences, most, typical in (
                ("boxes", " px", self.boxes_px, allowed.box_px, allowed.typical_px),
                ("scores", "", self.scores, allowed.score, allowed.typical_score),
            ):
                largest, middle = differences.max(), np.median(differences)
                if not largest <= most:
                    found.append(f"{what} differ by up to {largest:.3g}{unit}, expected at most {most:g}")
                if not middle <= typical:
                    found.append(f"the {what} differ by {middle:.3g}{unit} in the median, expected at most {typical:g}")
        return "; ".join(found)


def merged(parts: Sequence[Difference]) -> Difference:
    """Merge the differences of several images."""
    return Difference(
        sum(part.detections for part in parts),
        sum(part.matched for part in parts),
        np.concatenate([part.boxes_px for part in parts]),
        np.concatenate([part.scores for part in parts]),
    )


def compare(
    reference: Detections, found: Detections, *, conf: float, max_det: int, scale: float, margin: float
) -> Difference:
    """Match the detections of one image, both by the thresholds `conf` and `max_det`.

    `scale` is pixels of the network input per pixel of the image; scores may differ by `margin` at a threshold.
    """
    mine, theirs = _match(reference, found, scale)
    alone = _count_unmatched(reference, mine, conf, max_det, margin) + _count_unmatched(
        found, theirs, conf, max_det, margin
    )
    boxes = to_host(reference.boxes_xyxy)[mine].astype(np.float64) - to_host(found.boxes_xyxy)[theirs]
    scores = to_host(reference.scores)[mine].astype(np.float64) - to_host(found.scores)[theirs]
    matched = len(mine) + len(theirs)
    return Difference(matched + alone, matched, np.abs(boxes).max(1, initial=0) * scale, np.abs(scores))


def _match(reference: Detections, found: Detections, scale: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of matched detections: of one class, the closest first, then by overlap, each once.

    Distance comes first since boxes at the border of an image may have no area.
    """
    same = to_host(reference.classes)[:, None] == to_host(found.classes)
    apart = np.abs(to_host(reference.boxes_xyxy)[:, None] - to_host(found.boxes_xyxy)).max(2, initial=0) * scale
    iou = pairwise_iou(reference.boxes_xyxy, found.boxes_xyxy)
    likeness = np.where(apart < 1, 2 - apart, iou) * same
    rows, columns = np.nonzero(likeness >= _MIN_IOU)
    order = np.argsort(-likeness[rows, columns], kind="stable")
    partners: dict[int, int] = {}
    for row, column in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        if row not in partners and column not in partners.values():
            partners[row] = column
    return np.array([*partners], np.int64), np.array([*partners.values()], np.int64)


def _count_unmatched(found: Detections, partnered: NDArray[np.int64], conf: float, max_det: int, margin: float) -> int:
    """Count the unmatched detections, without those that a threshold may cut.

    A threshold may cut a score within `margin` of the confidence and, where there are `max_det` detections, within
    `margin` of the last one. Detections that the thresholds should have cut count.
    """
    scores = to_host(found.scores)
    limit = max(conf, float(scores[max_det - 1])) if len(scores) >= max_det else conf
    should_be_cut = ~(scores >= conf - margin) | (np.arange(len(scores)) >= max_det)  # NaN too
    counts = (scores > limit + margin) | should_be_cut
    counts[partnered] = False
    return int(counts.sum())
