"""Detections that differ because a suppression had a choice: of overlapping boxes whose scores are as good as equal,
rounding decides which one stays, and that decides what stays beside it.

What a file found instead is right where it is a suppression of the same candidates: each of its boxes is a candidate
of the network, overlaps none of its others too far, and each candidate that it left out is overlapped by a box that it
kept of no lower score.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.models.nms import Suppression, strongest_candidates, undo_letterbox
from tessera.utils.evaluation.matching import pairwise_iou, to_host
from tessera.utils.exporting.parity.difference import Tolerance
from tessera.utils.runtime.model import Backend
from tessera.utils.runtime.pipeline import fit_picture, network_input, picture_size
from tessera.utils.types import Detections


class Candidates(NamedTuple):
    """What a network predicts for a picture before the suppression.

    Attributes:
        placed: in pixels of the picture, cut at its border.
        in_batch: the same rows in pixels of the network's input, uncut, which is what the suppression compares.
    """

    placed: Detections
    in_batch: Detections


def candidates_of(backend: Backend, rules: Suppression, imgsz: int, picture: NDArray[np.uint8]) -> Candidates:
    """All predictions above the confidence of `rules`."""
    canvas, placement = fit_picture(picture, imgsz, backend.stride, backend.size_hw)
    decoded = backend(network_input(canvas, backend.accelerator.device))
    rows = strongest_candidates(decoded, rules).cpu()[0]
    rows = rows[rows[:, 4] > 0]
    in_batch = Detections(rows[:, :4], rows[:, 4], rows[:, 5].long())
    placed = undo_letterbox(in_batch, torch.tensor(placement, dtype=torch.float64), picture_size(picture))
    return Candidates(placed, in_batch)


def without_ties(
    reference: Detections,
    found: Detections,
    candidates: Candidates,
    rules: Suppression,
    scale: float,
    allowed: Tolerance,
) -> tuple[Detections, Detections]:
    """Both without the detections of which either may be there.

    Args:
        reference, found: in pixels of the picture, by the same `rules`.
        candidates: of the network that found `reference`.
        rules: of the suppression.
        scale: pixels of the network's input a pixel of the picture.
        allowed: how far a detection may be from its candidate; its `overlap` is a number.
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
    return _kept(reference, ~(is_gone & (is_suppressed | is_beyond))), _kept(found, ~(is_new & is_alone))


def _kept(found: Detections, mask: NDArray[np.bool_]) -> Detections:
    rows = torch.from_numpy(mask)
    return Detections(found.boxes_xyxy[rows], found.scores[rows], found.classes[rows])


def _places(found: Detections, candidates: Detections, scale: float, allowed: Tolerance) -> NDArray[np.int64]:
    """The candidate that each detection is, by its row; -1 where it is none."""
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
    """IoU of candidates that compete, (rows, columns); 0 where one of them is none."""
    boxes, classes = to_host(candidates.boxes_xyxy), to_host(candidates.classes)
    if not len(boxes):
        return np.zeros((len(rows), len(columns)))
    compete = (classes[rows][:, None] == classes[columns]) | agnostic
    real = (rows >= 0)[:, None] & (columns >= 0)
    return pairwise_iou(boxes[rows], boxes[columns]) * (compete & real)
