"""Comparison of the detections of a network and of its exported file on the same images.

Two rounds of thresholds show whether a file ignores them. NMS ties are no difference: of overlapping boxes with almost
equal scores, rounding decides which one stays. A file's detections are right too where they are an NMS result of the
same candidates: each box is a candidate of the network, overlaps none of the file's others too far, and each missing
candidate is overlapped by a box of the file with no lower score.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.deploy.runtime.pipeline import image_detector, image_hw, letterbox_image, network_input, nms_settings
from tessera.models.nms import NmsSettings, select_candidates, undo_letterbox
from tessera.utils.bit_depth import Pixels
from tessera.utils.evaluation.matching import pairwise_iou, to_host
from tessera.utils.evaluation.network import ImageDetector, Network
from tessera.utils.image_size import ImageSize, size_hw_of
from tessera.utils.types import Detections

_MIN_IOU = 0.5  # of two boxes that match


class Tolerance(NamedTuple):
    """Allowed differences between a file and its network."""

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


class OutputDifference(NamedTuple):
    """Differences between the detections of two pipelines."""

    detections: int  # of both together, without those near a threshold
    matched: int
    boxes_px: NDArray[np.float64]  # largest side difference of each matched box in pixels of the network input
    scores: NDArray[np.float64]  # differences of matched scores

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


def compare(
    reference: Detections, found: Detections, *, conf: float, max_det: int, scale: float, margin: float
) -> OutputDifference:
    """Match the detections of one image, both by the thresholds `conf` and `max_det`.

    `scale` is pixels of the network input per pixel of the image; scores may differ by `margin` at a threshold.
    """
    mine, theirs = _match(reference, found, scale)
    sides = (reference, mine), (found, theirs)
    alone = sum(_count_unmatched(side, rows, conf, max_det, margin) for side, rows in sides)
    boxes = to_host(reference.boxes_xyxy)[mine].astype(np.float64) - to_host(found.boxes_xyxy)[theirs]
    scores = to_host(reference.scores)[mine].astype(np.float64) - to_host(found.scores)[theirs]
    matched = len(mine) + len(theirs)
    return OutputDifference(matched + alone, matched, np.abs(boxes).max(1, initial=0) * scale, np.abs(scores))


def _match(reference: Detections, found: Detections, scale: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of matched detections: of one class, the closest first, then by overlap, each once.

    Distance comes first since boxes at the border of an image may have no area.
    """
    same = to_host(reference.classes)[:, None] == to_host(found.classes)
    apart = _distances(reference, found) * scale
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


class Round(NamedTuple):
    """Thresholds of one round on every `step`-th image."""

    conf: float
    iou: float
    max_det: int
    step: int = 1

    def rules(self, backend: Network | ImageDetector) -> NmsSettings:
        return nms_settings(backend, conf=self.conf, iou=self.iou, max_det=self.max_det)


ROUNDS = (Round(0.05, 0.6, 300), Round(0.35, 0.3, 3, 2))
UNSURE_ROUNDS = (Round(0.001, 0.6, 300), Round(0.003, 0.3, 3, 2))  # of a model with low scores alone


class RoundDetections(NamedTuple):
    """Detections of a network in each round."""

    rounds: tuple[Round, ...]
    detections: tuple[tuple[Detections, ...], ...]  # of each round, the detections of each image
    milliseconds: float  # median per image of the last round


def detect_rounds(
    backend: Network | ImageDetector, images: Sequence[Pixels], imgsz: ImageSize, rounds: tuple[Round, ...] = ROUNDS
) -> RoundDetections:
    """Run a network on the images; a UserError where it fails."""
    detect, by_round, times = image_detector(backend, imgsz), [], [0.0]
    for current in rounds:
        timed = [detect(image, current.rules(backend)) for image in images[:: current.step]]
        by_round.append(tuple(one.detections for one in timed))
        times = [sum(one.speed_ms) for one in timed]  # the first round compiles for each shape
    return RoundDetections(rounds, tuple(by_round), statistics.median(times))


def rounds_difference(
    reference: RoundDetections,
    other: RoundDetections,
    images: Sequence[Pixels],
    imgsz: ImageSize,
    allowed: Tolerance,
    network: Network,
) -> OutputDifference:
    """Return the differences between the detections of a network and of a file, without NMS ties."""
    parts = []
    for current, expected, found in zip(reference.rounds, reference.detections, other.detections, strict=True):
        for image, one, two in zip(images[:: current.step], expected, found, strict=True):
            scale = min(most / side for most, side in zip(size_hw_of(imgsz), image.shape[:2], strict=True))
            limits = {"conf": current.conf, "max_det": current.max_det, "scale": scale, "margin": allowed.margin}
            compared = compare(one, two, **limits)
            if allowed.overlap is not None and compared.exceeds(allowed):
                rules = current.rules(network)
                candidates = candidates_of(network, rules, imgsz, image)
                untied = compare(*without_ties(one, two, candidates, rules, scale, allowed), **limits)
                compared = compared if untied.exceeds(allowed) else untied
            parts.append(compared)
    counts = (sum(part.detections for part in parts), sum(part.matched for part in parts))
    boxes_px, scores = (np.concatenate(each) for each in zip(*(part[2:] for part in parts), strict=True))
    return OutputDifference(*counts, boxes_px, scores)


class Candidates(NamedTuple):
    """Predictions of a network for an image before NMS."""

    placed: Detections  # in pixels of the image, clipped to it
    in_batch: Detections  # the same rows in pixels of the network input, unclipped, as NMS compares them


def candidates_of(backend: Network, rules: NmsSettings, imgsz: ImageSize, image: Pixels) -> Candidates:
    """Return all predictions above the confidence of `rules`."""
    canvas, placement = letterbox_image(image, imgsz, backend.stride, backend.size_hw)
    rows = select_candidates(backend(network_input(canvas, backend.accelerator.device)), rules).cpu()[0]
    rows = rows[rows[:, 4] > 0]
    in_batch = Detections(rows[:, :4], rows[:, 4], rows[:, 5].long())
    placed = undo_letterbox(in_batch, torch.tensor(placement, dtype=torch.float64), image_hw(image))
    return Candidates(placed, in_batch)


def without_ties(
    reference: Detections,
    found: Detections,
    candidates: Candidates,
    rules: NmsSettings,
    scale: float,
    allowed: Tolerance,
) -> tuple[Detections, Detections]:
    """Remove detections that NMS ties explain from both sides.

    Both are by `rules` and in pixels of the image; `candidates` are those of the reference network. `scale` is pixels
    of the network input per pixel of the image, `allowed` the difference of a detection from its candidate.
    """
    assert allowed.overlap is not None
    mine, theirs = (_places(one, candidates.placed, scale, allowed) for one in (reference, found))
    is_new = (theirs >= 0) & ~np.isin(theirs, mine) & (np.arange(len(found)) < rules.max_det)
    is_gone = (mine >= 0) & ~np.isin(mine, theirs)

    beside = _overlaps(candidates.in_batch, theirs, theirs)
    np.fill_diagonal(beside, 0)
    is_alone = beside.max(1, initial=0) <= rules.iou + allowed.overlap

    scores = to_host(reference.scores)
    as_good = to_host(found.scores) >= scores[:, None] - allowed.margin
    over = _overlaps(candidates.in_batch, mine, theirs) * as_good
    is_full = len(found) >= rules.max_det
    is_beyond = scores <= (float(found.scores[-1]) + allowed.margin if is_full else -np.inf)
    is_suppressed = over.max(1, initial=0) >= rules.iou - allowed.overlap
    return _select(reference, ~(is_gone & (is_suppressed | is_beyond))), _select(found, ~(is_new & is_alone))


def _select(found: Detections, mask: NDArray[np.bool_]) -> Detections:
    rows = torch.from_numpy(mask)
    return Detections(found.boxes_xyxy[rows], found.scores[rows], found.classes[rows])


def _places(found: Detections, candidates: Detections, scale: float, allowed: Tolerance) -> NDArray[np.int64]:
    """Return the row of each detection among the candidates of its class and score, the nearest; -1 = none."""
    if not len(candidates):
        return np.full(len(found), -1)
    apart = _distances(found, candidates) * scale
    score_differences = np.abs(to_host(found.scores)[:, None] - to_host(candidates.scores))
    same = to_host(found.classes)[:, None] == to_host(candidates.classes)
    apart[~(same & (score_differences <= allowed.score) & (apart <= allowed.box_px))] = np.inf
    return np.where(np.isfinite(apart.min(1)), apart.argmin(1), -1)


def _distances(some: Detections, others: Detections) -> NDArray[np.float64]:
    """Return the largest side difference of each two boxes."""
    return np.abs(to_host(some.boxes_xyxy)[:, None] - to_host(others.boxes_xyxy)).max(2, initial=0)


def _overlaps(candidates: Detections, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the IoU of competing candidates, of one class, (rows, columns); 0 where one is -1."""
    boxes, classes = to_host(candidates.boxes_xyxy), to_host(candidates.classes)
    if not len(boxes):
        return np.zeros((len(rows), len(columns)))
    compete = (classes[rows][:, None] == classes[columns]) & (rows >= 0)[:, None] & (columns >= 0)
    return pairwise_iou(boxes[rows], boxes[columns]) * compete
