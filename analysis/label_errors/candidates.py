"""Candidate label errors: disagreements of detections with labels.

Legend: D detections and G labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.analysis.label_errors.evidence import (
    MOST,
    ROW,
    Counts,
    Evidence,
    LabelErrorKind,
    Rows,
    bins_of,
    most_likely,
    sizes_of,
    steps_of,
)
from tessera.utils.evaluation.matching import BACKGROUND_IOU, Kind, Matches, match_image, pairwise_iou, to_host
from tessera.utils.types import Batch, DatasetIndex, Detections

MIN_CONFIDENCE = 0.05  # of a detection that says anything about a label
SUPPORTED = 0.25  # support from which on a label is not spurious
WELL_PLACED_IOU = 0.85
DUPLICATE_IOU = 0.6  # of two labels of a class that may be of one object


class Labels(NamedTuple):
    """The labels of an image: classes (G,), boxes (G, 4), ignored regions, height and width."""

    classes: NDArray[np.int32]
    boxes_xyxy: NDArray[np.float32]
    regions: tuple[NDArray[np.int32], NDArray[np.float32]]
    size_hw: tuple[int, ...]


class _Scene(NamedTuple):
    """An image: its matches, detections by descending score, and labels.

    Attributes:
        own: int64 (G,), the true positive of each label; -1 without one.
        support: float32 (G,), its score.
        iou: float64 (D, G).
    """

    matches: Matches
    scores: NDArray[np.float32]
    boxes: NDArray[np.float32]
    labels: Labels
    own: NDArray[np.int64]
    support: NDArray[np.float32]
    iou: NDArray[np.float64]


def find_candidates(image: int, detections: Detections, labels: Labels, counts: Counts) -> Rows:
    """Return the candidate label errors of an image of the dataset, and add to `counts`.

    Detections are needed down to low confidences, in pixels of the original image. Scores are rounded to four digits,
    so that the last bits of a float decide nothing.
    """
    order = np.argsort(-to_host(detections.scores).astype(np.float32), kind="stable")  # that of the matches
    boxes = to_host(detections.boxes_xyxy).astype(np.float32).reshape(-1, 4)[order].round(2)
    matches = match_image(detections, labels.boxes_xyxy, labels.classes, labels.regions)
    correct, own = np.flatnonzero(matches.kinds == Kind.CORRECT), np.full(len(labels.classes), -1)
    own[matches.objects[correct]] = correct
    scores = matches.scores.round(4)
    support = np.where(own >= 0, np.append(scores, np.float32(0))[own], np.float32(0))
    scene = _Scene(matches, scores, boxes, labels, own, support, pairwise_iou(boxes, labels.boxes_xyxy))
    duplicates = _duplicates(scene)
    shifted, confused = _best(scene, Kind.LOCALIZATION, duplicates), _best(scene, Kind.WRONG_CLASS, duplicates)
    explained = support.copy()  # by any detection
    for d, g in (*shifted, *confused):
        explained[g] = max(explained[g], scores[d])
    placed = [(d, g) for g, d in enumerate(own.tolist()) if d >= 0 and scores[d] >= MIN_CONFIDENCE]
    _count(scene, explained, [*placed, *shifted], counts)
    beside = [(d, g) for d, g in placed if scene.iou[d, g] < WELL_PLACED_IOU and g not in duplicates]
    unsupported = np.flatnonzero(explained < SUPPORTED).tolist()
    found = [
        (LabelErrorKind.MISSING, [(d, -1) for d in _uncovered(scene, {d for d, _ in shifted})]),
        (LabelErrorKind.SPURIOUS, [(-1, g) for g in unsupported if g not in duplicates]),
        (LabelErrorKind.SHIFTED, [*shifted, *beside]),
        (LabelErrorKind.WRONG_CLASS, confused),
        (LabelErrorKind.DUPLICATE, [(-1, g) for g in duplicates]),
    ]
    reached = scene.iou > BACKGROUND_IOU
    rows = []
    for kind, d, g in ((kind, d, g) for kind, pairs in found for d, g in pairs):
        other, iou = duplicates.get(g, (-1, 0.0))
        if d < 0:
            near, of = False, (labels.classes[g], explained[g], labels.boxes_xyxy[g])
        else:
            other, iou = -1, scene.iou[d, g] if g >= 0 else 0.0
            near = reached[d].sum() > reached[d, g] if g >= 0 else matches.kinds[d] != Kind.BACKGROUND
            of = matches.classes[d], scores[d], boxes[d]
        rows.append((kind, image, g, other, of[0], of[1], support[g] if g >= 0 else 0.0, iou, near, of[2]))
    return np.array(rows, ROW)


def _count(scene: _Scene, explained: NDArray[np.float32], placed: Sequence[tuple[int, int]], counts: Counts) -> None:
    """Count detections, and labels by support and IoU."""
    counted = np.flatnonzero(scene.matches.kinds != Kind.IGNORED)
    correct = scene.matches.kinds[counted] == Kind.CORRECT
    near = (scene.iou[counted] > BACKGROUND_IOU).sum(1) > correct
    places = near.astype(np.int64), scene.matches.classes[counted], bins_of(scene.scores[counted])
    np.add.at(counts.detections, places, 1)
    np.add.at(counts.correct, tuple(place[correct] for place in places), 1)
    labels = scene.labels
    sizes = sizes_of(labels.boxes_xyxy, labels.size_hw)
    np.add.at(counts.supports, (labels.classes, sizes, steps_of(explained)), 1)
    for d, g in placed:
        counts.overlaps[labels.classes[g], bins_of(scene.iou[d, g])] += 1


def _duplicates(scene: _Scene) -> dict[int, tuple[int, float]]:
    """Return the labels that repeat another one of their class, with the other and the IoU.

    Of two, the one with more support stays, else the earlier. Two that are both supported are two objects.
    """
    of, found = scene.labels, dict[int, tuple[int, float]]()
    if len(of.classes) < 2:
        return found
    iou = np.triu(pairwise_iou(of.boxes_xyxy, of.boxes_xyxy), 1)
    iou[of.classes[:, None] != of.classes] = 0
    first, second = np.nonzero(iou >= DUPLICATE_IOU)
    for i, j in sorted(zip(first.tolist(), second.tolist(), strict=True), key=lambda pair: (-iou[pair], pair)):
        if i in found or j in found or min(scene.support[i], scene.support[j]) >= SUPPORTED:
            continue
        stays, goes = (i, j) if scene.support[i] >= scene.support[j] else (j, i)
        found[goes] = (stays, float(iou[i, j]))
    return found


def _best(scene: _Scene, kind: Kind, duplicates: dict[int, tuple[int, float]]) -> list[tuple[int, int]]:
    """Return the most confident detection of a kind about each label that clearly beats the label's support."""
    best: dict[int, int] = {}
    for d in np.flatnonzero((scene.matches.kinds == kind) & (scene.scores >= MIN_CONFIDENCE)).tolist():
        g = int(scene.matches.objects[d])
        if g not in duplicates and scene.scores[d] > 2 * scene.support[g]:
            best.setdefault(g, d)
    return [(d, g) for g, d in sorted(best.items())]


def _uncovered(scene: _Scene, used: set[int]) -> list[int]:
    """Return detections that no label covers; of several in one location the most confident one."""
    sure = np.flatnonzero(scene.scores >= MIN_CONFIDENCE)
    free = np.isin(scene.matches.kinds[sure], (Kind.BACKGROUND, Kind.LOCALIZATION, Kind.BOTH))
    covered = np.triu(pairwise_iou(scene.boxes[sure], scene.boxes[sure]) >= 0.5, 1).any(0)
    return [d for d in sure[free & ~covered].tolist() if d not in used]


class EvidenceCollector:
    """Collector of the evidence from this rank's images.

    `class_of` is as in Settings; labels of classes that the model lacks are treated as ignored regions.
    """

    def __init__(self, index: DatasetIndex, class_of: Sequence[int]) -> None:
        self._index, self._known = index, np.isin(np.arange(len(index.names)), class_of)
        self._counts, self._rows, self._new = Counts.none(len(index.names)), list[Rows](), 0

    def add(self, batch: Batch, found: Sequence[Detections]) -> None:
        """Add the images of a batch."""
        for image, detections in zip(batch.indices.tolist(), found, strict=True):
            classes, boxes = self._index.labels(image)
            of_regions, regions = self._index.ignored(image)
            known = self._known[classes]
            of_regions = np.append(of_regions, np.full((~known).sum(), -1, np.int32))
            regions = np.concatenate((regions, boxes[~known]))
            size_hw = tuple(self._index.sizes_hw[image].tolist())
            rows = find_candidates(
                image, detections, Labels(classes[known], boxes[known], (of_regions, regions), size_hw), self._counts
            )
            places = np.append(np.flatnonzero(known), -1).astype(np.int32)  # rows among all labels; -1 stays
            rows["object"], rows["other"] = places[rows["object"]], places[rows["other"]]
            self._rows.append(rows)
            self._new += len(rows)
        if self._new > MOST:
            self.evidence()

    def evidence(self) -> Evidence:
        """Return the evidence of the images so far."""
        self._rows, self._new = [most_likely(np.concatenate([np.zeros(0, ROW), *self._rows]))], 0
        return Evidence(self._rows[0], self._counts)
