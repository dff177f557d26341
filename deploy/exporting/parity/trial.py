"""Detections of the network and of its exported file on the same images, compared without regard to NMS ties.

Two sets of thresholds show whether a file ignores them. Ties in NMS are no difference: of overlapping boxes with almost
equal scores, rounding decides which one stays. A file's detections are right too where they are an NMS result of the
same candidates: each box is a candidate of the network, overlaps none of the file's others too far, and each missing
candidate is overlapped by a box of the file with no lower score.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.deploy.exporting.parity.difference import Difference, Tolerance, compare, merged
from tessera.deploy.runtime.pipeline import image_detector, image_hw, letterbox_image, network_input, nms_settings
from tessera.models.nms import NmsSettings, select_candidates, undo_letterbox
from tessera.utils.bit_depth import Pixels
from tessera.utils.evaluation.matching import pairwise_iou, to_host
from tessera.utils.evaluation.network import ImageDetector, Network
from tessera.utils.types import Detections


class Round(NamedTuple):
    """Thresholds of a trial on every `step`-th image."""

    conf: float
    iou: float
    max_det: int
    step: int = 1

    def rules(self, backend: Network | ImageDetector) -> NmsSettings:
        return nms_settings(backend, conf=self.conf, iou=self.iou, max_det=self.max_det)


ROUNDS = (Round(0.05, 0.6, 300), Round(0.35, 0.3, 3, 2))
UNSURE_ROUNDS = (Round(0.001, 0.6, 300), Round(0.003, 0.3, 3, 2))  # of a model with low scores alone


class Trial(NamedTuple):
    """Detections of a network in each round."""

    rounds: tuple[Round, ...]
    found: tuple[tuple[Detections, ...], ...]  # of each round, the detections of each image
    milliseconds: float  # median per image of the last round


def run_trial(
    backend: Network | ImageDetector, images: Sequence[Pixels], imgsz: int, rounds: tuple[Round, ...] = ROUNDS
) -> Trial:
    """Run a network on the images; a UserError where it fails."""
    detect, found_by_round, times = image_detector(backend, imgsz), [], [0.0]  # the first round compiles for each shape
    for current in rounds:
        found, times, rules = [], [], current.rules(backend)
        for image in images[:: current.step]:
            started = time.perf_counter()
            found.append(detect(image, rules).detections)
            times.append(1000 * (time.perf_counter() - started))
        found_by_round.append(tuple(found))
    return Trial(rounds, tuple(found_by_round), statistics.median(times))


def trial_difference(
    reference: Trial, other: Trial, images: Sequence[Pixels], imgsz: int, allowed: Tolerance, network: Network
) -> Difference:
    """Return the differences between the trials of a network and of a file, without NMS ties."""
    parts = []
    for current, expected, found in zip(reference.rounds, reference.found, other.found, strict=True):
        for image, one, two in zip(images[:: current.step], expected, found, strict=True):
            scale = imgsz / max(image.shape[:2])
            limits = {"conf": current.conf, "max_det": current.max_det, "scale": scale, "margin": allowed.margin}
            compared = compare(one, two, **limits)
            if allowed.overlap is not None and compared.exceeds(allowed):
                rules = current.rules(network)
                candidates = candidates_of(network, rules, imgsz, image)
                untied = compare(*without_ties(one, two, candidates, rules, scale, allowed), **limits)
                compared = compared if untied.exceeds(allowed) else untied
            parts.append(compared)
    return merged(parts)


class Candidates(NamedTuple):
    """Predictions of a network for an image before NMS."""

    placed: Detections  # in pixels of the image, clipped to it
    in_batch: Detections  # the same rows in pixels of the network input, unclipped, as NMS compares them


def candidates_of(backend: Network, rules: NmsSettings, imgsz: int, image: NDArray[np.uint8]) -> Candidates:
    """Return all predictions above the confidence of `rules`."""
    canvas, placement = letterbox_image(image, imgsz, backend.stride, backend.size_hw)
    decoded = backend(network_input(canvas, backend.accelerator.device))
    rows = select_candidates(decoded, rules).cpu()[0]
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

    beside = _overlaps(candidates.in_batch, theirs, theirs, agnostic=rules.agnostic)
    np.fill_diagonal(beside, 0)
    is_alone = beside.max(1, initial=0) <= rules.iou + allowed.overlap

    scores = to_host(reference.scores)
    as_good = to_host(found.scores) >= scores[:, None] - allowed.margin
    over = _overlaps(candidates.in_batch, mine, theirs, agnostic=rules.agnostic) * as_good
    is_full = len(found) >= rules.max_det
    is_beyond = scores <= (float(found.scores[-1]) + allowed.margin if is_full else -np.inf)
    is_suppressed = over.max(1, initial=0) >= rules.iou - allowed.overlap
    return _select(reference, ~(is_gone & (is_suppressed | is_beyond))), _select(found, ~(is_new & is_alone))


def _select(found: Detections, mask: NDArray[np.bool_]) -> Detections:
    rows = torch.from_numpy(mask)
    return Detections(found.boxes_xyxy[rows], found.scores[rows], found.classes[rows])


def _places(found: Detections, candidates: Detections, scale: float, allowed: Tolerance) -> NDArray[np.int64]:
    """Return the row of each detection among the candidates; -1 = none."""
    places = np.full(len(found), -1)
    rows = (to_host(part) for part in (found.boxes_xyxy, found.scores, found.classes))
    boxes, scores, classes = (to_host(part) for part in (candidates.boxes_xyxy, candidates.scores, candidates.classes))
    for row, (box, score, kind) in enumerate(zip(*rows, strict=True)):
        first = np.searchsorted(-scores, -score - allowed.score)  # scores descend
        near = slice(first, np.searchsorted(-scores, -score + allowed.score, side="right"))
        apart = np.where(classes[near] == kind, np.abs(boxes[near] - box).max(1, initial=0) * scale, np.inf)
        if len(apart) and apart.min() <= allowed.box_px:
            places[row] = first + apart.argmin()
    return places


def _overlaps(
    candidates: Detections, rows: NDArray[np.int64], columns: NDArray[np.int64], *, agnostic: bool
) -> NDArray[np.float64]:
    """Return the IoU of competing candidates, (rows, columns); 0 where one is -1."""
    boxes, classes = to_host(candidates.boxes_xyxy), to_host(candidates.classes)
    if not len(boxes):
        return np.zeros((len(rows), len(columns)))
    compete = (classes[rows][:, None] == classes[columns]) | agnostic
    real = (rows >= 0)[:, None] & (columns >= 0)
    return pairwise_iou(boxes[rows], boxes[columns]) * (compete & real)
