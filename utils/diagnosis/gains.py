"""What mAP50 would be without the errors of each kind: TIDE (Bolya et al. 2020).

Each kind is fixed alone. Where the class or the place is wrong, the most confident detection about an object that none
is correct for becomes correct, and the others go; false detections of other kinds go; missed objects are left out of
the labels. AP is COCO's: recalls are compared as pycocotools does, and classes without objects count nothing.

Legend: C classes that have objects, E rungs of a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.average_precision import RECALLS, Ranking, precision_steps
from tessera.utils.evaluation.matching import FALSE_KINDS, Kind

ERROR_KINDS = (*FALSE_KINDS, Kind.MISSED)


class ErrorGains(NamedTuple):
    """What AP50 would gain.

    Attributes:
        class_ids: int64 (C,).
        ap50: float64 (C,), as it is.
        by_kind: float64 (C, 6), without the errors of each of `ERROR_KINDS`.
        without_false: float64 (C,), without any false detection.
        without_missing: float64 (C,), with only those objects in the labels that are found.
    """

    class_ids: NDArray[np.int64]
    ap50: NDArray[np.float64]
    by_kind: NDArray[np.float64]
    without_false: NDArray[np.float64]
    without_missing: NDArray[np.float64]

    def means(self) -> dict[Kind, float]:
        """What mAP50 would gain without the errors of each kind; 0 where there is no object."""
        means = self.by_kind.sum(0) / max(len(self.class_ids), 1)
        return dict(zip(ERROR_KINDS, means.tolist(), strict=True))


def error_gains(ranking: Ranking) -> ErrorGains:
    """Gains of a ranking, which has counted the errors."""
    objects = np.diff(ranking.target_offsets)
    of_classes = np.zeros((len(objects), 3 + len(ERROR_KINDS)))
    for c, count in enumerate(objects.tolist()):
        rows = slice(ranking.rung_offsets[c], ranking.rung_offsets[c + 1])
        of_classes[c] = _class_aps(ranking.rungs[rows], ranking.false_above[rows], count)
    ap50, gains = of_classes[:, 0], of_classes[:, 1:] - of_classes[:, :1]
    return ErrorGains(ranking.class_ids, ap50, gains[:, :-2], gains[:, -2], gains[:, -1])


def _class_aps(rungs: NDArray[np.uint8], false_above: NDArray[np.int32], objects: int) -> list[float]:
    """AP50 of a class as it is, without the errors of each kind, without false ones, without objects not found.

    Args:
        rungs: (E,), `Ranking.rungs` of the class.
        false_above: (E, 5).
        objects: of the class.
    """
    found = int((rungs == Kind.CORRECT).sum())

    def ap(fixed: Kind, removed: Sequence[Sequence[Kind]], counts: Sequence[int]) -> list[float]:
        """AP with the rungs of a kind as correct ones; a figure for each set of removed kinds and count of objects."""
        right = (rungs == Kind.CORRECT) | (rungs == fixed)
        stays = np.array([[kind not in kinds for kinds in removed] for kind in FALSE_KINDS])
        correct = np.cumsum(right)[right, None].astype(np.float64)
        listed = correct + false_above[right] @ stays
        envelope, gained = precision_steps(np.broadcast_to(correct, listed.shape), listed, np.array(counts, np.float32))
        means: list[float] = (np.einsum("hr,hr->r", envelope, gained) / len(RECALLS)).tolist()
        return means

    fixed = [ap(kind, [[kind]], [objects])[0] for kind in FALSE_KINDS[:2]]
    as_is, *others = ap(
        Kind.CORRECT,
        [[], *([kind] for kind in FALSE_KINDS[2:]), [], FALSE_KINDS, []],
        [*[objects] * 4, len(rungs), objects, found],  # an object that is not missed has a rung
    )
    return [as_is, *fixed, *others]
