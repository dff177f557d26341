"""What the detections of a validation say of the labels.

Legend: D detections and G labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.matching import BACKGROUND_IOU, Kind, match_image, pairwise_iou, to_host
from tessera.utils.evaluation.sinks import Sink
from tessera.utils.suspects.evidence import (
    MOST,
    ROW,
    Counts,
    Evidence,
    Rows,
    Suspicion,
    bins_of,
    most_likely,
    sizes_of,
    steps_of,
)
from tessera.utils.types import Batch, DatasetIndex, Detections

LEAST = 0.05  # confidence of a detection that says anything
SURE = 0.25  # support from which on a label is no spurious one
LEAST_SHIFT = 0.85  # IoU from which on a label lies well
TWICE = 0.6  # IoU from which on two labels of a class may be of one object


class Labels(NamedTuple):
    """The labels of an image: classes (G,), boxes (G, 4), ignored regions, height and width."""

    classes: NDArray[np.int32]
    boxes_xyxy: NDArray[np.float32]
    regions: tuple[NDArray[np.int32], NDArray[np.float32]]
    size_hw: tuple[int, ...]


class _Scene(NamedTuple):
    """A picture: its detections by descending score, with what `match_image` says of them, and its labels.

    Attributes:
        own: int64 (G,), the detection that is correct for each label; -1 without one.
        support: float32 (G,), its score.
        iou: float64 (D, G).
        near: bool (D, G), whether the detection reaches a label other than this one.
    """

    scores: NDArray[np.float32]
    classes: NDArray[np.int32]
    boxes: NDArray[np.float32]
    kinds: NDArray[np.uint8]
    objects: NDArray[np.signedinteger]
    labels: Labels
    own: NDArray[np.int64]
    support: NDArray[np.float32]
    iou: NDArray[np.float64]
    near: NDArray[np.bool_]


def judge(image: int, detections: Detections, labels: Labels, counts: Counts) -> Rows:
    """What may be wrong with the labels of an image; `counts` are added to.

    Args:
        image: its dataset index.
        detections: down to low confidences, in pixels of the original image; scores are taken to four digits, so that
            the last bits of a float decide nothing.
        labels: of it.
        counts: of the images so far.
    """
    scene = _scene(detections, labels)
    _count(scene, counts)
    twins = _twins(scene)
    shifted, confused = _best(scene, Kind.BADLY_PLACED, twins), _best(scene, Kind.WRONG_CLASS, twins)
    explained = scene.support.copy()  # by any detection
    for d, g in (*shifted, *confused):
        explained[g] = max(explained[g], scene.scores[d])
    _count_labels(scene, explained, shifted, counts)
    lone = [(-1, g) for g in range(len(explained)) if explained[g] < SURE and g not in twins]
    beside = [
        (d, g)
        for g, d in enumerate(scene.own.tolist())
        if d >= 0 and scene.scores[d] >= LEAST and scene.iou[d, g] < LEAST_SHIFT and g not in twins
    ]
    found = [
        (Suspicion.MISSING, [(d, -1) for d in _uncovered(scene, {d for d, _ in shifted})]),
        (Suspicion.SPURIOUS, lone),
        (Suspicion.SHIFTED, [*shifted, *beside]),
        (Suspicion.WRONG_CLASS, confused),
        (Suspicion.DUPLICATE, [(-1, g) for g in twins]),
    ]
    rows = [_row(scene, image, kind, d, g, explained, twins) for kind, pairs in found for d, g in pairs]
    return np.array(rows, ROW)


def _row(
    scene: _Scene,
    image: int,
    kind: Suspicion,
    d: int,
    g: int,
    explained: NDArray[np.float32],
    twins: dict[int, tuple[int, float]],
) -> tuple[object, ...]:
    """A `ROW`: of detection `d` and label `g`, -1 for none."""
    of = scene.labels
    other, iou = twins.get(g, (-1, 0.0))
    support = scene.support[g] if g >= 0 else 0.0
    if d < 0:
        return kind, image, g, other, of.classes[g], explained[g], support, iou, False, of.boxes_xyxy[g]
    near = scene.near[d, g] if g >= 0 else scene.kinds[d] != Kind.BACKGROUND
    iou = scene.iou[d, g] if g >= 0 else 0.0
    return kind, image, g, -1, scene.classes[d], scene.scores[d], support, iou, near, scene.boxes[d]


def _scene(detections: Detections, labels: Labels) -> _Scene:
    order = np.argsort(-to_host(detections.scores).astype(np.float32), kind="stable")  # that of the matches
    boxes = to_host(detections.boxes_xyxy).astype(np.float32).reshape(-1, 4)[order].round(2)
    matches = match_image(detections, labels.boxes_xyxy, labels.classes, labels.regions)
    count = len(labels.classes)
    own = np.full(count, -1)
    correct = np.flatnonzero(matches.kinds == Kind.CORRECT)
    own[matches.objects[correct]] = correct
    scores = matches.scores.round(4)
    support = np.where(own >= 0, np.append(scores, np.float32(0))[own], np.float32(0))
    iou = pairwise_iou(boxes, labels.boxes_xyxy)
    reached = iou > BACKGROUND_IOU
    near = reached.sum(1)[:, None] > reached
    return _Scene(scores, matches.classes, boxes, matches.kinds, matches.objects, labels, own, support, iou, near)


def _count(scene: _Scene, counts: Counts) -> None:
    """Count the detections."""
    counted = np.flatnonzero(scene.kinds != Kind.IGNORED)
    correct = scene.kinds[counted] == Kind.CORRECT
    near = (scene.iou[counted] > BACKGROUND_IOU).sum(1) > correct
    bins = bins_of(scene.scores[counted])
    places = near.astype(np.int64), scene.classes[counted], bins
    np.add.at(counts.finds, places, 1)
    np.add.at(counts.correct, tuple(place[correct] for place in places), 1)


def _count_labels(
    scene: _Scene, explained: NDArray[np.float32], shifted: Sequence[tuple[int, int]], counts: Counts
) -> None:
    """Count the labels, by what is found there and by how well they lie."""
    classes = scene.labels.classes
    np.add.at(
        counts.supports, (classes, sizes_of(scene.labels.boxes_xyxy, scene.labels.size_hw), steps_of(explained)), 1
    )
    pairs = [(d, g) for g, d in enumerate(scene.own.tolist()) if d >= 0 and scene.scores[d] >= LEAST]
    for d, g in (*pairs, *shifted):
        counts.overlaps[classes[g], bins_of(scene.iou[d, g])] += 1


def _twins(scene: _Scene) -> dict[int, tuple[int, float]]:
    """Labels that repeat another one of their class: the other, and the IoU of the two.

    Of two the one stays that the detector supports more; of equal ones the earlier. Two that it finds apart are two.
    """
    of, found = scene.labels, dict[int, tuple[int, float]]()
    if len(of.classes) < 2:
        return found
    iou = np.triu(pairwise_iou(of.boxes_xyxy, of.boxes_xyxy), 1)
    iou[of.classes[:, None] != of.classes] = 0
    first, second = np.nonzero(iou >= TWICE)
    for i, j in sorted(zip(first.tolist(), second.tolist(), strict=True), key=lambda pair: (-iou[pair], pair)):
        if i in found or j in found or min(scene.support[i], scene.support[j]) >= SURE:
            continue
        stays, goes = (i, j) if scene.support[i] >= scene.support[j] else (j, i)
        found[goes] = (stays, float(iou[i, j]))
    return found


def _best(scene: _Scene, kind: Kind, twins: dict[int, tuple[int, float]]) -> list[tuple[int, int]]:
    """The most confident detection of a kind about each label that is surer than what agrees with the label."""
    best: dict[int, int] = {}
    for d in np.flatnonzero((scene.kinds == kind) & (scene.scores >= LEAST)).tolist():
        g = int(scene.objects[d])
        if g not in twins and scene.scores[d] > 2 * scene.support[g]:
            best.setdefault(g, d)
    return [(d, g) for g, d in sorted(best.items())]


def _uncovered(scene: _Scene, used: set[int]) -> list[int]:
    """Detections that show what no label is about; of several in one place the most confident one."""
    sure = np.flatnonzero(scene.scores >= LEAST)
    free = np.isin(scene.kinds[sure], (Kind.BACKGROUND, Kind.BADLY_PLACED, Kind.BOTH))
    covered = np.triu(pairwise_iou(scene.boxes[sure], scene.boxes[sure]) >= 0.5, 1).any(0)
    return [d for d in sure[free & ~covered].tolist() if d not in used]


class EvidenceSink(Sink):
    """Gathers the evidence of this rank's images.

    Args:
        index: the whole split.
        class_of: as of Settings; labels of classes that the model lacks are taken for ignored regions.
    """

    def __init__(self, index: DatasetIndex, class_of: Sequence[int]) -> None:
        self._index, self._known = index, np.isin(np.arange(len(index.names)), class_of)
        self._counts, self._rows = Counts.none(len(index.names)), list[Rows]()

    def add(self, batch: Batch, found: Sequence[Detections]) -> None:
        """Judge the labels of a batch."""
        for image, detections in zip(batch.indices.tolist(), found, strict=True):
            classes, boxes = self._index.labels(image)
            of_regions, regions = self._index.ignored(image)
            known = self._known[classes]
            of_regions = np.append(of_regions, np.full((~known).sum(), -1, np.int32))
            regions = np.concatenate((regions, boxes[~known]))
            size_hw = tuple(self._index.sizes_hw[image].tolist())
            rows = judge(
                image, detections, Labels(classes[known], boxes[known], (of_regions, regions), size_hw), self._counts
            )
            places = np.append(np.flatnonzero(known), -1).astype(np.int32)  # among all labels; -1 stays
            rows["object"], rows["other"] = places[rows["object"]], places[rows["other"]]
            self._rows.append(rows)
        if sum(map(len, self._rows[1:])) > MOST:
            self.evidence()

    def evidence(self) -> Evidence:
        """Of the images so far."""
        self._rows = [most_likely(np.concatenate([np.zeros(0, ROW), *self._rows]))]
        return Evidence(self._rows[0], self._counts)
