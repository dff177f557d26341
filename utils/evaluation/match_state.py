"""Matches of many images: collected on every rank, and sent to rank 0 as few bytes, ranked already.

So that the outcome depends neither on ranks nor on batches.

Legend: N images, D detections, M objects, T = 10 IoU thresholds, C classes that have objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.matching import IOU_THRESHOLDS, ImageMatches, Kind

CONFIDENCES: NDArray[np.float64] = np.linspace(0.0, 1.0, 1000)  # the axis of the curves
STEPS = len(CONFIDENCES) + 1  # how many of them a score may reach: none, or up to all

Unsigned = NDArray[np.unsignedinteger]


class LastHits(NamedTuple):
    """How far down a class's detections decide its average precision.

    Attributes:
        class_ids: int32 (C,), classes that have objects, ascending.
        scores: float32 (C,), the lowest score of a detection that is correct at some threshold, or would be at IoU 0.5
            were its class or its place right; infinite where there is none.
    """

    class_ids: NDArray[np.int32]
    scores: NDArray[np.float32]

    @classmethod
    def joined(cls, parts: Sequence[LastHits]) -> LastHits:
        """Of the images of all parts; a class may occur in a part more than once."""
        class_ids, where = np.unique(
            np.concatenate([np.zeros(0, np.int32), *(part.class_ids for part in parts)]), return_inverse=True
        )
        scores = np.full(len(class_ids), np.inf, np.float32)
        np.minimum.at(scores, where, np.concatenate([np.zeros(0, np.float32), *(part.scores for part in parts)]))
        return cls(class_ids, scores)


class NearMisses(NamedTuple):
    """Of each object without a detection of its own at IoU 0.5, the most confident one whose class or place is wrong.

    Attributes:
        class_rows: int64 (K,), ascending, classes of the objects as rows of `LastHits.class_ids`.
        scores: float32 (K,), of the detections.
        images: unsigned (K,), as rows of `MatchState.images`.
        kinds: uint8 (K,), `WRONG_CLASS` or `BADLY_PLACED`.
    """

    class_rows: NDArray[np.int64]
    scores: NDArray[np.float32]
    images: Unsigned
    kinds: NDArray[np.uint8]


@dataclass(frozen=True)
class MatchState:
    """Matches of a rank's images, small to send and quick to join with those of the others.

    Detections are sorted by class, then by descending score, then by image, then by their order in the image.
    Detections of classes without objects are left out. A detection that scores below the lowest hit of its class, on
    whichever rank that is, is not kept but counted: of such ones the metrics need only how many reach each confidence.

    Attributes:
        class_ids: int32 (C,), see `LastHits`: the same on every rank.
        images: int64 (N,), dataset indices, ascending.
        target_images: unsigned (M,), image of each object as a row of `images`, by class.
        target_counts: unsigned (C,), objects of each class.
        scores: float32 (D,).
        detection_images: unsigned (D,), as rows of `images`.
        detection_counts: unsigned (C,), detections of each class.
        marked: unsigned (K,), which of the D are correct or ignored at some threshold; few.
        correct: uint16 (K,), bit t: at threshold t they have an object of their own.
        ignored: uint16 (K,), bit t: at threshold t they have none, and an ignored region covers them.
        kinds: uint8 (D,), the `Kind` of each.
        near_misses: what would be correct at IoU 0.5 were its class or its place right.
        below: int64 (L,), ascending, `class row · STEPS + steps`: where detections below the last hits lie that are not
            ignored at IoU 0.5; a step is a point of `CONFIDENCES` that a score reaches.
        below_counts: unsigned (L,), how many.
    """

    class_ids: NDArray[np.int32]
    images: NDArray[np.int64]
    target_images: Unsigned
    target_counts: Unsigned
    scores: NDArray[np.float32]
    detection_images: Unsigned
    detection_counts: Unsigned
    marked: Unsigned
    correct: NDArray[np.uint16]
    ignored: NDArray[np.uint16]
    kinds: NDArray[np.uint8]
    near_misses: NearMisses
    below: NDArray[np.int64]
    below_counts: Unsigned


class Packed(NamedTuple):
    """One image, or several end to end; fields as in `ImageMatches`, but thresholds as bits.

    Attributes:
        target_classes: int32 (M,).
        scores: float32 (D,), classes: int32 (D,), correct, ignored: uint16 (D,), kinds: uint8 (D,).
        objects: signed (D,), as rows of the objects of the same image.
    """

    target_classes: NDArray[np.int32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int32]
    correct: NDArray[np.uint16]
    ignored: NDArray[np.uint16]
    kinds: NDArray[np.uint8]
    objects: NDArray[np.signedinteger]


class Found(NamedTuple):
    """All images of a rank, in the order of the dataset.

    Attributes:
        images: int64 (N,), their indices.
        target_counts, detection_counts: int64 (N,).
        packed: of all of them.
    """

    images: NDArray[np.int64]
    target_counts: NDArray[np.int64]
    detection_counts: NDArray[np.int64]
    packed: Packed

    def finders(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of each object, as rows of the detections, -1 for none, twice (M,): which is correct, and its near miss.

        The near miss is the most confident detection which is about the object, but whose class or place is wrong.
        """
        found, starts = self.packed, np.cumsum(self.target_counts) - self.target_counts
        about = np.flatnonzero(found.kinds <= Kind.BADLY_PLACED)
        rows = np.repeat(starts, self.detection_counts)[about] + found.objects[about]
        is_correct = found.kinds[about] == Kind.CORRECT
        correct, near_misses = np.full(len(found.target_classes), -1), np.full(len(found.target_classes), -1)
        correct[rows[is_correct]] = about[is_correct]
        # An image's detections are sorted: the first one about an object is the most confident.
        missed, first = np.unique(rows[~is_correct], return_index=True)
        near_misses[missed] = about[~is_correct][first]
        return correct, near_misses


class Accumulator:
    """Collects the matches of the images that this rank has seen."""

    def __init__(self) -> None:
        self._images: list[int] = []
        self._packed: list[Packed] = []

    def add(self, image: int, matches: ImageMatches) -> None:
        """Add an image by its index in the dataset; each image once."""
        self._images.append(image)
        ignored = ~matches.correct & (np.arange(len(IOU_THRESHOLDS)) < matches.in_regions[:, None])
        correct_bits, ignored_bits = _as_bits(matches.correct), _as_bits(ignored)
        self._packed.append(
            Packed(
                matches.target_classes,
                matches.scores,
                matches.classes,
                correct_bits,
                ignored_bits,
                matches.kinds,
                matches.objects,
            )
        )

    def found(self) -> Found:
        """Everything added so far."""
        images = np.array(self._images, np.int64)
        by_image = np.argsort(images, kind="stable")
        packed = [self._packed[i] for i in by_image]
        return Found(
            images[by_image],
            np.array([len(p.target_classes) for p in packed], np.int64),
            np.array([len(p.scores) for p in packed], np.int64),
            _joined(packed),
        )

    def last_hits(self) -> LastHits:
        """Of the images so far."""
        everything = self.found()
        found = everything.packed
        hits = found.correct > 0
        objects, near_misses = _near_misses(everything)
        return LastHits.joined(
            [
                LastHits(found.target_classes, np.full(len(found.target_classes), np.inf, np.float32)),
                LastHits(found.classes[hits], found.scores[hits]),
                LastHits(found.target_classes[objects], found.scores[near_misses]),
            ]
        )

    def state(self, last_hits: LastHits) -> MatchState:
        """Everything added so far, for rank 0.

        Args:
            last_hits: of the images of all ranks.
        """
        everything = self.found()
        found, nc = everything.packed, len(last_hits.class_ids)
        rows = np.arange(len(everything.images))

        target_rows = np.searchsorted(last_hits.class_ids, found.target_classes)
        by_class = np.argsort(target_rows, kind="stable")
        images_of_targets = np.repeat(rows, everything.target_counts)

        class_rows = smallest(np.searchsorted(last_hits.class_ids, found.classes))
        known = np.isin(found.classes, last_hits.class_ids)
        matters = known.copy()
        matters[known] = found.scores[known] >= last_hits.scores[class_rows[known]]
        below = known & ~matters & (found.ignored & 1 == 0)
        cells, cell_counts = np.unique(
            class_rows[below].astype(np.int64) * STEPS + steps_of(found.scores[below]), return_counts=True
        )

        order = np.flatnonzero(matters)
        order = order[np.argsort(-found.scores[order], kind="stable")]
        order = order[np.argsort(class_rows[order], kind="stable")]
        correct, ignored = found.correct[order], found.ignored[order]
        marked = np.flatnonzero(correct | ignored)
        images_of_detections = smallest(np.repeat(rows, everything.detection_counts))
        objects, near_misses = _near_misses(everything)
        in_order = np.argsort(target_rows[objects], kind="stable")
        objects, near_misses = objects[in_order], near_misses[in_order]
        return MatchState(
            last_hits.class_ids,
            everything.images,
            smallest(images_of_targets[by_class]),
            smallest(np.bincount(target_rows, minlength=nc)),
            found.scores[order],
            images_of_detections[order],
            smallest(np.bincount(class_rows[order], minlength=nc)),
            smallest(marked),
            correct[marked],
            ignored[marked],
            found.kinds[order],
            NearMisses(
                target_rows[objects],
                found.scores[near_misses],
                smallest(images_of_targets[objects]),
                found.kinds[near_misses],
            ),
            cells,
            smallest(cell_counts),
        )


def steps_of(scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """How many points of `CONFIDENCES` each score reaches."""
    return np.searchsorted(CONFIDENCES, scores.astype(np.float64), side="right")


def smallest(values: NDArray[np.int64]) -> Unsigned:
    """The same whole numbers in as few bytes as the largest needs."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


def _as_bits(flags: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """(D, T) to uint16 (D,), bit t from column t."""
    return flags @ (1 << np.arange(flags.shape[1], dtype=np.uint16))


def _near_misses(found: Found) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Objects that have a near miss and no detection of their own, and the near_misses, as rows of all."""
    correct, near_misses = found.finders()
    objects = np.flatnonzero((correct < 0) & (near_misses >= 0))
    return objects, near_misses[objects]


def _joined(packed: Sequence[Packed]) -> Packed:
    """The arrays of images one after the other."""
    none, no_bits = np.zeros(0, np.int32), np.zeros(0, np.uint16)
    empty = Packed(none, np.zeros(0, np.float32), none, no_bits, no_bits, np.zeros(0, np.uint8), np.zeros(0, np.int8))
    return Packed(*(np.concatenate(column) for column in zip(empty, *packed, strict=True)))
