"""What the detections on one picture after the other say of its labels.

Whether a detector is right to disagree is known only once all pictures are seen. So each rank keeps what may be wrong
with single labels, a bounded number, and counts how often the detector agrees with the labels otherwise.

Legend: D detections and G labels of a picture, R rows, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.matching import BACKGROUND_IOU, Kind, match_image, pairwise_iou, to_host
from tessera.utils.evaluation.sinks import Sink
from tessera.utils.types import Batch, DatasetIndex, Detections

MOST = 20_000  # rows of each kind
LEAST = 0.05  # confidence of a detection that says anything
SURE = 0.25  # support from which on a label is no spurious one
LEAST_SHIFT = 0.85  # IoU from which on a label lies well
TWICE = 0.6  # IoU from which on two labels of a class may be of one object
BINS = 20  # of confidence and of IoU
SUPPORTS: NDArray[np.float32] = np.array(
    [1e-6, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, *np.arange(0.2, 0.95, 0.1)], np.float32
)  # edges of bins
SIZES = (0.05, 0.15)  # side of a label as a share of the picture's: edges of its three sizes


class Suspicion(IntEnum):
    """What may be wrong with a label."""

    MISSING = 0  # a detection that no label covers
    SPURIOUS = 1  # a label that no detection supports
    SHIFTED = 2  # a label beside the detection of its class
    WRONG_CLASS = 3  # a label below a detection of another class
    DUPLICATE = 4  # a second label of an object


class Rows(NamedTuple):
    """What may be wrong, one by one.

    Attributes:
        kinds: uint8 (R,), `Suspicion`.
        images: int64 (R,), dataset indices.
        objects: int32 (R,), row of the label among those of the image; -1 of a missing one.
        others: int32 (R,), the label that a duplicate repeats; else -1.
        classes: int32 (R,), of the detection; of a spurious or duplicate label its own.
        confidences: float32 (R,), of the detection; of a spurious label that of the best one about it, 0 without one.
        supports: float32 (R,), confidence of the best detection that agrees with the label; 0 without one.
        ious: float32 (R,), of label and detection, or of two labels; 0 where there are not two.
        near: bool (R,), whether the detection reaches a label that the row is not about.
        boxes_xyxy: float32 (R, 4), of the detection, or of the label; pixels of the original image.
    """

    kinds: NDArray[np.uint8]
    images: NDArray[np.int64]
    objects: NDArray[np.int32]
    others: NDArray[np.int32]
    classes: NDArray[np.int32]
    confidences: NDArray[np.float32]
    supports: NDArray[np.float32]
    ious: NDArray[np.float32]
    near: NDArray[np.bool_]
    boxes_xyxy: NDArray[np.float32]

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """All rows of the parts."""
        return cls._make(np.concatenate(column) for column in zip(_NO_ROWS, *parts, strict=True))

    def at(self, rows: NDArray[np.integer] | NDArray[np.bool_]) -> Rows:
        """Those of `rows`, in that order."""
        return Rows._make(column[rows] for column in self)

    def most(self) -> Rows:
        """At most `MOST` of each kind, those that are most likely before anything is known of the detector."""
        first = np.select(
            [self.kinds == Suspicion.SPURIOUS, self.kinds == Suspicion.DUPLICATE],
            [1 - self.confidences, self.ious],
            self.confidences,
        )
        order = np.lexsort((*self.boxes_xyxy.T, self.objects, self.images, -first, self.kinds))
        kinds = self.kinds[order]
        return self.at(order[np.arange(len(order)) - np.searchsorted(kinds, kinds) < MOST])


_NO_ROWS = Rows(
    np.zeros(0, np.uint8),
    np.zeros(0, np.int64),
    *(np.zeros(0, np.int32) for _ in range(3)),  # type: ignore[arg-type]
    *(np.zeros(0, np.float32) for _ in range(3)),  # type: ignore[arg-type]
    np.zeros(0, np.bool_),
    np.zeros((0, 4), np.float32),
)


class Counts(NamedTuple):
    """How detector and labels agree otherwise.

    Attributes:
        finds, correct: int64 (2, C, BINS), detections by whether they reach a label that is not theirs, class and
            confidence; and those that are correct at IoU 0.5.
        supports: int64 (C, 3, len(SUPPORTS) + 1), labels by class, size, and confidence of what is found there.
        overlaps: int64 (C, BINS), labels by class and IoU with the best detection of their class.
    """

    finds: NDArray[np.int64]
    correct: NDArray[np.int64]
    supports: NDArray[np.int64]
    overlaps: NDArray[np.int64]

    @classmethod
    def none(cls, nc: int) -> Counts:
        """Of no image; `nc` classes."""
        shapes = (2, nc, BINS), (2, nc, BINS), (nc, len(SIZES) + 1, len(SUPPORTS) + 1), (nc, BINS)
        return cls._make(np.zeros(shape, np.int64) for shape in shapes)

    def add(self, other: Counts) -> None:
        """Count these too."""
        for mine, theirs in zip(self, other, strict=True):
            mine += theirs


class Evidence(NamedTuple):
    """Of some images: what may be wrong, and how detector and labels agree otherwise."""

    rows: Rows
    counts: Counts

    @classmethod
    def joined(cls, nc: int, parts: Sequence[Evidence]) -> Evidence:
        """Of the images of all parts; the same however they are divided."""
        counts = Counts.none(nc)
        for part in parts:
            counts.add(part.counts)
        return cls(Rows.joined([part.rows for part in parts]).most(), counts)


class EvidenceSink(Sink):
    """Gathers the evidence of this rank's images.

    Args:
        index: the whole split.
    """

    def __init__(self, index: DatasetIndex) -> None:
        self._index = index
        self._found, self._waiting = Evidence.joined(len(index.names), []), list[Rows]()
        self._count = 0

    def add(self, batch: Batch, in_batch: Sequence[Detections], in_original: Sequence[Detections]) -> None:
        """Judge the labels of a batch."""
        for image, detections in zip(batch.indices.tolist(), in_original, strict=True):
            classes, boxes = self._index.labels(image)
            labels = Labels(classes, boxes, self._index.ignored(image), tuple(self._index.sizes_hw[image].tolist()))
            rows = judge(image, detections, labels, self._found.counts)
            self._waiting.append(rows)
            self._count += len(rows.kinds)
        if self._count > MOST:
            self.evidence()

    def evidence(self) -> Evidence:
        """Of the images so far."""
        rows = Rows.joined([self._found.rows, *self._waiting]).most()
        self._found, self._count = Evidence(rows, self._found.counts), 0
        self._waiting.clear()
        return self._found


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
    if not rows:
        return _NO_ROWS
    columns = zip(_NO_ROWS, zip(*rows, strict=True), strict=True)
    return Rows._make(np.array(values, none.dtype) for none, values in columns)


def _row(
    scene: _Scene,
    image: int,
    kind: Suspicion,
    d: int,
    g: int,
    explained: NDArray[np.float32],
    twins: dict[int, tuple[int, float]],
) -> tuple[object, ...]:
    """A row, with the values of `Rows`: of detection `d` and label `g`, -1 for none."""
    of = scene.labels
    other, iou = twins.get(g, (-1, 0.0))
    support = scene.support[g] if g >= 0 else 0.0
    if d < 0:
        return kind, image, g, other, of.classes[g], explained[g], support, iou, False, of.boxes_xyxy[g]
    near = scene.near[d, g] if g >= 0 else scene.kinds[d] != Kind.BACKGROUND
    iou = scene.iou[d, g] if g >= 0 else 0.0
    return kind, image, g, -1, scene.classes[d], scene.scores[d], support, iou, near, scene.boxes[d]


def _scene(detections: Detections, labels: Labels) -> _Scene:
    scores = to_host(detections.scores).astype(np.float32).round(4)
    order = np.argsort(-scores, kind="stable")
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
    return _Scene(
        scores, matches.classes, boxes, matches.kinds, matches.objects, labels, own, support, iou, near
    )


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
    np.add.at(counts.supports, (classes, sizes_of(scene.labels.boxes_xyxy, scene.labels.size_hw), steps_of(explained)), 1)
    pairs = [(d, g) for g, d in enumerate(scene.own.tolist()) if d >= 0 and scene.scores[d] >= LEAST]
    for d, g in (*pairs, *shifted):
        counts.overlaps[classes[g], bins_of(scene.iou[d, g])] += 1


def bins_of(shares: NDArray[np.floating] | np.floating) -> NDArray[np.int64]:
    """The bin of each confidence or IoU."""
    return np.minimum(np.asarray(shares) * BINS, BINS - 1).astype(np.int64)


def steps_of(supports: NDArray[np.float32]) -> NDArray[np.int64]:
    """The bin of each support, 0 of none."""
    return np.searchsorted(SUPPORTS, supports, side="right")


def sizes_of(boxes_xyxy: NDArray[np.float32], sizes_hw: NDArray[np.int32] | tuple[int, ...]) -> NDArray[np.int64]:
    """Small, medium or large: 0, 1 or 2, by the root of the area as a share of that of the picture."""
    area = (boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).clip(0).prod(1)
    return np.searchsorted(SIZES, np.sqrt(area / np.prod(np.asarray(sizes_hw, np.float64), -1)), side="right")


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
