"""Disagreements of two detectors: objects that one alone detects, and false positives of one alone.

Each side uses its own confidence threshold, at IoU 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.matching import FALSE_KINDS, IOU_THRESHOLDS, Kind, Matches, pairwise_iou
from tessera.utils.types import DatasetIndex

SHOWN = 8  # images that B worsens most, and as many that it improves most


class ImageResult(NamedTuple):
    """Detections of an image above the threshold, by descending score, in pixels of the original image.

    `wrong` (D,) marks false positives; `found` (G,) marks detected objects.
    """

    boxes_xyxy: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int32]
    wrong: NDArray[np.bool_]
    found: NDArray[np.bool_]


def detections_above(matches: Matches, threshold: float) -> dict[int, ImageResult]:
    """Return the detections of each image above a confidence threshold."""
    results, start = {}, 0
    sizes = zip(*(column.tolist() for column in matches[:3]), strict=True)
    for image, objects, detections in sizes:
        end = start + int((matches.scores[start : start + detections] >= threshold).sum())
        kinds, found = matches.kinds[start:end], np.zeros(objects, np.bool_)
        found[matches.objects[start:end][kinds == Kind.CORRECT]] = True
        results[image] = ImageResult(
            matches.boxes_xyxy[start:end],
            matches.scores[start:end],
            matches.classes[start:end],
            np.isin(kinds, FALSE_KINDS),
            found,
        )
        start += detections
    return results


class ImageDisagreements(NamedTuple):
    """Disagreements on one image of the dataset.

    Attributes:
        lost, gained: int64 (k,), objects that A alone detects, and B alone.
        wrong_a, wrong_b: int64 (k,), false positives of A alone, and of B alone.
    """

    image: int
    lost: NDArray[np.int64]
    gained: NDArray[np.int64]
    wrong_a: NDArray[np.int64]
    wrong_b: NDArray[np.int64]

    @property
    def cost(self) -> int:
        """Mistakes that B adds to the image, minus those it removes."""
        return len(self.lost) + len(self.wrong_b) - len(self.gained) - len(self.wrong_a)


class Disagreements(NamedTuple):
    """Disagreements on all images.

    Attributes:
        both, lost, gained, neither: objects detected by both, A alone, B alone, none.
        wrong_both, wrong_a, wrong_b: false positives of both sides (same class, IoU 0.5), of A alone, of B alone.
        lost_of_class, gained_of_class: int64 (nc,).
        worse, better: the images that B worsens, and improves, most; the strongest first.
    """

    threshold_a: float
    threshold_b: float
    both: int
    lost: int
    gained: int
    neither: int
    wrong_both: int
    wrong_a: int
    wrong_b: int
    lost_of_class: NDArray[np.int64]
    gained_of_class: NDArray[np.int64]
    worse: tuple[ImageDisagreements, ...]
    better: tuple[ImageDisagreements, ...]


def find_disagreements(
    a: Mapping[int, ImageResult],
    b: Mapping[int, ImageResult],
    index: DatasetIndex,
    threshold_a: float,
    threshold_b: float,
) -> Disagreements:
    """Compare the detections of both sides on the same images of the split `index`."""
    assert a.keys() == b.keys(), "both sides are of the same images"
    counts = dict.fromkeys(("both", "lost", "gained", "neither", "wrong_both", "wrong_a", "wrong_b"), 0)
    lost_of_class, gained_of_class = (np.zeros(len(index.names), np.int64) for _ in range(2))
    changed = []
    for image, of_a in a.items():
        of_b, classes = b[image], index.labels(image)[0]
        alone_a, alone_b, shared = _alone(of_a, of_b)
        one = ImageDisagreements(
            image, np.flatnonzero(of_a.found & ~of_b.found), np.flatnonzero(of_b.found & ~of_a.found), alone_a, alone_b
        )
        counts["both"] += int((of_a.found & of_b.found).sum())
        counts["neither"] += int((~of_a.found & ~of_b.found).sum())
        counts["wrong_both"] += shared
        for name in ("lost", "gained", "wrong_a", "wrong_b"):
            counts[name] += len(getattr(one, name))
        np.add.at(lost_of_class, classes[one.lost], 1)
        np.add.at(gained_of_class, classes[one.gained], 1)
        if one.cost:
            changed.append(one)
    changed.sort(key=lambda one: (-one.cost, one.image))
    worse = [one for one in changed[:SHOWN] if one.cost > 0]
    better = [one for one in changed[: -SHOWN - 1 : -1] if one.cost < 0]
    return Disagreements(
        threshold_a,
        threshold_b,
        **counts,
        lost_of_class=lost_of_class,
        gained_of_class=gained_of_class,
        worse=tuple(worse),
        better=tuple(better),
    )


def _alone(a: ImageResult, b: ImageResult) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return the false positives of each side alone, and the number of pairs; confident ones of A choose first."""
    rows_a, rows_b = np.flatnonzero(a.wrong), np.flatnonzero(b.wrong)
    iou = pairwise_iou(a.boxes_xyxy[rows_a], b.boxes_xyxy[rows_b])
    iou[(a.classes[rows_a][:, None] != b.classes[rows_b]) | (iou < IOU_THRESHOLDS[0])] = 0
    paired_a, paired_b = np.zeros(len(rows_a), np.bool_), np.zeros(len(rows_b), np.bool_)
    for row in np.flatnonzero(iou.any(1)):
        offers = np.where(paired_b, 0.0, iou[row])
        if offers.any():
            paired_a[row] = paired_b[offers.argmax()] = True
    return rows_a[~paired_a], rows_b[~paired_b], int(paired_a.sum())
