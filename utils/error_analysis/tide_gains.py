"""What mAP50 would be without the errors of each kind: TIDE (Bolya et al. 2020).

Each kind is fixed alone. Where the class or the place is wrong, the most confident detection about an object that none
is correct for becomes correct, and the others go; false detections of other kinds go; missed objects are left out of
the labels. AP is COCO's: recalls are compared as pycocotools does, and classes without objects count nothing.

Legend: C classes that have objects, E candidates of a class.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.average_precision import RECALLS, Ranking, precision_steps
from tessera.utils.evaluation.matching import FALSE_KINDS, Kind

ERROR_KINDS = (*FALSE_KINDS, Kind.MISSED)


def error_gains(ranking: Ranking) -> dict[Kind, float]:
    """What mAP50 would gain without the errors of each of `ERROR_KINDS`; 0 where there is no object.

    Args:
        ranking: that has counted the errors.
    """
    objects = np.diff(ranking.target_offsets)
    gains = np.zeros(len(ERROR_KINDS))
    for c, count in enumerate(objects.tolist()):
        rows = slice(ranking.candidate_offsets[c], ranking.candidate_offsets[c + 1])
        gains += _class_gains(ranking.candidates[rows], ranking.false_positives_above[rows], count)
    return dict(zip(ERROR_KINDS, (gains / max(len(objects), 1)).tolist(), strict=True))


def _class_gains(
    candidates: NDArray[np.uint8], false_positives_above: NDArray[np.int32], objects: int
) -> NDArray[np.float64]:
    """What AP50 of a class would gain without the errors of each kind.

    Args:
        candidates: (E,), `Ranking.candidates` of the class.
        false_positives_above: (E, 5).
        objects: of the class.
    """

    def ap(fixed: Kind, removed: Sequence[Kind | None], counts: Sequence[int]) -> list[float]:
        """AP with the candidates of a kind as correct ones; a figure for each kind that is removed and count of objects."""
        right = (candidates == Kind.CORRECT) | (candidates == fixed)
        stays = np.array([[kind != other for other in removed] for kind in FALSE_KINDS])
        correct = np.cumsum(right)[right, None].astype(np.float64)
        listed = correct + false_positives_above[right] @ stays
        envelope, gained = precision_steps(np.broadcast_to(correct, listed.shape), listed, np.array(counts, np.float32))
        means: list[float] = (np.einsum("hr,hr->r", envelope, gained) / len(RECALLS)).tolist()
        return means

    fixed = [ap(kind, [kind], [objects])[0] for kind in FALSE_KINDS[:2]]
    counts = [*[objects] * 4, len(candidates)]  # an object that is not missed has a rung
    as_is, *others = ap(Kind.CORRECT, [None, *FALSE_KINDS[2:], None], counts)
    return np.array([*fixed, *others]) - as_is
