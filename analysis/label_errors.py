"""Likely label errors (`--find-errors`): disagreements of a detector with the labels, ranked by a score from 0 to 1.

How far a detector can be trusted is known only after all images. So each rank keeps candidates, bounded in number, and
counts of agreement; those of all ranks are joined. The score estimates how likely the detector is right to disagree:

- trust in a detection is the precision at its confidence, scaled by that of its class;
- a label without support scores high where the detector detects nearly all labels of that class and size;
- a shifted label scores high where the others of its class fit well.

All of these are multiplied by mAP50: a detector that often errs disagrees with correct labels. The AP50 of each class
instead would rank planted errors lower. Duplicates rest on the labels alone.

Legend: D detections and G labels of an image, R rows of candidates, C classes, B bins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.analysis.error_analysis import Box, ImageLabels
from tessera.utils.evaluation.matching import BACKGROUND_IOU, Kind, Matches, match_image, pairwise_iou, to_host
from tessera.utils.files import atomic_write
from tessera.utils.text import plural, strict_json
from tessera.utils.types import Batch, DatasetIndex, Detections

MOST = 20_000  # rows of each kind
BINS = 20  # of confidence and of IoU
SUPPORTS: NDArray[np.float32] = np.array(
    [1e-6, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, *np.arange(0.2, 0.95, 0.1)], np.float32
)  # edges of bins
SIZES = (0.05, 0.15)  # edges of three sizes: side of a label as a fraction of the image's
Rows = NDArray[np.void]  # (R,) of ROW: candidate label errors
ROW = np.dtype(
    [
        ("kind", np.uint8),  # `LabelErrorKind`
        ("image", np.int64),  # dataset index
        ("object", np.int32),  # row of the label among those of the image; -1 of a missing one
        ("other", np.int32),  # the label that a duplicate repeats; else -1
        ("class", np.int32),  # of the detection; of a spurious or duplicate label its own
        # Of the detection; of a spurious label that of the best detection about it, else 0.
        ("confidence", np.float32),
        ("support", np.float32),  # confidence of the best detection that agrees with the label; 0 without one
        ("iou", np.float32),  # of label and detection, or of two labels; 0 where there are not two
        ("near", np.bool_),  # whether the detection reaches a label that the row is not about
        ("box_xyxy", np.float32, 4),  # of the detection, or of the label; pixels of the original image
    ]
)
MIN_CONFIDENCE = 0.05  # of a detection that says anything about a label
SUPPORTED = 0.25  # support from which on a label is not spurious
WELL_PLACED_IOU = 0.85
DUPLICATE_IOU = 0.6  # of two labels of a class that may be of one object
MIN_SCORE = 0.1  # of a listed error
_WEIGHT = 10.0  # of the prior from all classes, in objects
_DOUBT = 4.0  # exponent of the fraction of better labels
_FAR, _CLOSE = 0.3, 0.1  # IoU from which on a label surely is about a detection, and up to which it is not
FILE = "label_errors.jsonl"
LIKELY = 0.5  # score of the errors that the table counts separately
WEAK = 0.5  # mAP50 of a detector whose suspicions are few and doubtful


class LabelErrorKind(IntEnum):
    """Kind of a label error."""

    MISSING = 0  # a detection that no label covers
    SPURIOUS = 1  # a label that no detection supports
    SHIFTED = 2  # a label beside the detection of its class
    WRONG_CLASS = 3  # a label below a detection of another class
    DUPLICATE = 4  # a second label of an object


def most_likely(rows: Rows) -> Rows:
    """Return at most `MOST` rows of each kind, the most likely ones by detection confidence."""
    first = np.select(
        [rows["kind"] == LabelErrorKind.SPURIOUS, rows["kind"] == LabelErrorKind.DUPLICATE],
        [1 - rows["confidence"], rows["iou"]],
        rows["confidence"],
    )
    rows = rows[np.lexsort((*rows["box_xyxy"].T, rows["object"], rows["image"], -first, rows["kind"]))]
    return rows[np.arange(len(rows)) - np.searchsorted(rows["kind"], rows["kind"]) < MOST]


class Counts(NamedTuple):
    """Counts of how well detector and labels agree."""

    detections: NDArray[np.int64]  # (2, C, BINS), by whether they reach a label that is not theirs, class, confidence
    correct: NDArray[np.int64]  # the true positives of them at IoU 0.5
    supports: NDArray[np.int64]  # (C, 3, len(SUPPORTS) + 1), labels by class, size, confidence of the best detection
    overlaps: NDArray[np.int64]  # (C, BINS), labels by class and IoU with the best detection of their class

    @classmethod
    def none(cls, nc: int) -> Counts:
        shapes = (2, nc, BINS), (2, nc, BINS), (nc, len(SIZES) + 1, len(SUPPORTS) + 1), (nc, BINS)
        return cls._make(np.zeros(shape, np.int64) for shape in shapes)


class Evidence(NamedTuple):
    """Candidates and counts of some images."""

    rows: Rows
    counts: Counts

    @classmethod
    def joined(cls, nc: int, parts: Sequence[Evidence]) -> Evidence:
        """Join the evidence of all parts; the result does not depend on how images are divided."""
        counts = Counts._make(
            sum(tables) for tables in zip(Counts.none(nc), *(part.counts for part in parts), strict=True)
        )
        return cls(most_likely(np.concatenate([np.zeros(0, ROW), *(part.rows for part in parts)])), counts)


def bins_of(values: NDArray[np.floating] | np.floating) -> NDArray[np.int64]:
    return np.minimum(np.asarray(values) * BINS, BINS - 1).astype(np.int64)


def steps_of(supports: NDArray[np.float32]) -> NDArray[np.int64]:
    return np.searchsorted(SUPPORTS, supports, side="right")


def sizes_of(boxes_xyxy: NDArray[np.float32], sizes_hw: NDArray[np.int32] | tuple[int, ...]) -> NDArray[np.int64]:
    """Return 0, 1 or 2 for small, medium or large, by the root of the area relative to the image."""
    area = (boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).clip(0).prod(1)
    return np.searchsorted(SIZES, np.sqrt(area / np.prod(np.asarray(sizes_hw, np.float64), -1)), side="right")


class Labels(NamedTuple):
    """The labels of an image: classes (G,), boxes (G, 4), ignored regions, height and width, and unlabelled classes."""

    classes: NDArray[np.int32]
    boxes_xyxy: NDArray[np.float32]
    regions: tuple[NDArray[np.int32], NDArray[np.float32]]
    size_hw: tuple[int, ...]
    unlabelled: NDArray[np.bool_] | None = None  # (C,); None = the image labels all


class _Scene(NamedTuple):
    """An image: its matches, detections by descending score, and labels."""

    matches: Matches
    scores: NDArray[np.float32]
    boxes: NDArray[np.float32]
    labels: Labels
    own: NDArray[np.int64]  # (G,), the true positive of each label; -1 without one
    support: NDArray[np.float32]  # (G,), its score
    iou: NDArray[np.float64]  # (D, G)


def find_candidates(image: int, detections: Detections, labels: Labels, counts: Counts) -> Rows:
    """Return the candidate label errors of an image of the dataset, and add to `counts`.

    Detections are needed down to low confidences, in pixels of the original image. Scores are rounded to four digits,
    so that the last bits of a float decide nothing.
    """
    order = np.argsort(-to_host(detections.scores).astype(np.float32), kind="stable")  # that of the matches
    boxes = to_host(detections.boxes_xyxy).astype(np.float32).reshape(-1, 4)[order].round(2)
    matches = match_image(detections, labels.boxes_xyxy, labels.classes, labels.regions, labels.unlabelled)
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
            labels = Labels(classes[known], boxes[known], (of_regions, regions), size_hw, self._index.unlabelled(image))
            rows = find_candidates(image, detections, labels, self._counts)
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


@dataclass(frozen=True)
class LabelError:
    """A label that is likely wrong; boxes are xyxy pixels of the original image."""

    score: float
    kind: LabelErrorKind
    image: int  # dataset index
    object: int  # row of the label among those of the image; -1 for a missing one
    other: int  # the label that a duplicate repeats; else -1
    labelled: int | None  # class of the label; None if missing
    suggested: int | None  # class it should have; None if it should not exist
    confidence: float  # of the detection; for a spurious label that of the best detection about it, else 0
    iou: float | None  # of label and detection, or of two labels
    box: Box | None
    suggested_box: Box | None  # where it should be


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
    labelled, suggested = int(classes[own]) if own >= 0 else None, None if goes else int(row["class"])
    iou, suggested_box = float(row["iou"]) or None, box if kind is LabelErrorKind.WRONG_CLASS else found
    where, confidence = (image, own, int(row["other"])), float(row["confidence"])
    return LabelError(score, kind, *where, labelled, suggested, confidence, iou, box, None if goes else suggested_box)


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


NAMES = {kind: kind.name.lower().replace("_", " ") for kind in LabelErrorKind}
EXPLAINED = {
    LabelErrorKind.MISSING: "a detection where nothing is labelled",
    LabelErrorKind.SPURIOUS: "a label where nothing is detected",
    LabelErrorKind.SHIFTED: "the object is detected beside its label",
    LabelErrorKind.WRONG_CLASS: "an object of another class is detected there",
    LabelErrorKind.DUPLICATE: "two labels of one object",
}


def write_label_errors(
    target: Path, suspects: Sequence[LabelError], index: DatasetIndex, labels: Mapping[int, ImageLabels]
) -> None:
    """Write one JSON line per label error, atomically."""
    with atomic_write(target) as file:
        for suspect in suspects:
            file.write(f"{strict_json(_row(suspect, index, labels.get(suspect.image)))}\n".encode())


def _row(suspect: LabelError, index: DatasetIndex, labels: ImageLabels | None) -> dict[str, object]:
    line, own = labels.place(suspect.object) if labels else (None, None)
    other_line, other = labels.place(suspect.other) if labels else (None, None)
    labelled, suggested = (None if c is None else index.names[c] for c in (suspect.labelled, suspect.suggested))
    boxes = suspect.box, suspect.suggested_box
    box, suggested_box = (None if one is None else [round(side, 2) for side in one] for one in boxes)
    return {
        "score": suspect.score,
        "kind": NAMES[suspect.kind],
        "image": str(index.path(suspect.image)),
        "label": labels.file if labels else None,
        "line": line,
        "id": own,
        "other_line": other_line,
        "other_id": other,
        "class": labelled,
        "suggested_class": suggested,
        "confidence": round(suspect.confidence, 4),
        "iou": None if suspect.iou is None else round(suspect.iou, 4),
        "box": box,
        "suggested_box": suggested_box,
    }


def counts(suspects: Sequence[LabelError]) -> list[tuple[LabelErrorKind, str, int, int]]:
    """Return for each kind its name, the number of errors, and the number with a score of at least `LIKELY`."""
    found = []
    for kind in LabelErrorKind:
        scores = [suspect.score for suspect in suspects if suspect.kind is kind]
        found.append((kind, NAMES[kind], len(scores), sum(score >= LIKELY for score in scores)))
    return found


def label_error_table(
    suspects: Sequence[LabelError], map50: float, labels: int, images: int, unknown: int = 0
) -> list[str]:
    """Return console lines: the number of errors of each kind, and of those with a score of at least `LIKELY`.

    `map50` is the detector's on these labels; `unknown` counts labels of classes that the weights do not know.
    """
    among = f"among {plural(labels, 'label')} of {plural(images, 'image')}"
    if unknown:
        among += f" (left out: {plural(unknown, 'label')} of classes that the weights do not know)"
    if not suspects:
        return [f"Label errors: none suspected {among}."]
    rows = counts(suspects)
    lines = [
        f"Label errors: {plural(len(suspects), 'suspect')} {among}, {sum(likely for *_, likely in rows):,} with a "
        f"score of {LIKELY:g} or more:",
        f"{'kind':>22}{'suspects':>11}{f'from {LIKELY:g}':>11}",
    ]
    lines += [f"{name:>22}{every:>11,}{likely:>11,}   {EXPLAINED[kind]}" for kind, name, every, likely in rows]
    return [*lines, trust_line(map50)]


def trust_line(map50: float) -> str:
    """Return how far a detector with this mAP50 on the labels is trusted."""
    doubt = " Such a detector is often wrong itself: train it further before you trust the list." * (map50 < WEAK)
    return f"Scores of all kinds but duplicate are multiplied by mAP50 on these labels, {map50:.3f}.{doubt}"
