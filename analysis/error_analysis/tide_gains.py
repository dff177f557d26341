"""mAP50 gained without each kind of error: TIDE (Bolya et al. 2020).

Each kind is fixed alone. For a wrong class or a bad location, the most confident detection about an object without a
true positive becomes correct, and the others are removed. Other false positives are removed; missed objects are removed
from the ground truth. AP is COCO's: recalls are compared as by pycocotools, classes without objects are excluded.

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
    """Return the mAP50 gained without the errors of each of `ERROR_KINDS`; 0 without objects."""
    objects = np.diff(ranking.target_offsets)
    gains = np.zeros(len(ERROR_KINDS))
    for c, count in enumerate(objects.tolist()):
        rows = slice(ranking.candidate_offsets[c], ranking.candidate_offsets[c + 1])
        gains += _class_gains(ranking.candidates[rows], ranking.false_positives_above[rows], count)
    return dict(zip(ERROR_KINDS, (gains / max(len(objects), 1)).tolist(), strict=True))


def _class_gains(
    candidates: NDArray[np.uint8], false_positives_above: NDArray[np.int32], objects: int
) -> NDArray[np.float64]:
    """Return the AP50 that a class gains without each kind of error; arguments as in `Ranking`, (E,) and (E, 5)."""

    def ap(fixed: Kind, removed: Sequence[Kind | None], counts: Sequence[int]) -> list[float]:
        """Return one AP per removed kind and object count, with candidates of kind `fixed` as true positives."""
        right = (candidates == Kind.CORRECT) | (candidates == fixed)
        stays = np.array([[kind != other for other in removed] for kind in FALSE_KINDS])
        correct = np.cumsum(right)[right, None].astype(np.float64)
        listed = correct + false_positives_above[right] @ stays
        envelope, gained = precision_steps(np.broadcast_to(correct, listed.shape), listed, np.array(counts, np.float32))
        means: list[float] = (np.einsum("hr,hr->r", envelope, gained) / len(RECALLS)).tolist()
        return means

    fixed = [ap(kind, [kind], [objects])[0] for kind in FALSE_KINDS[:2]]
    counts = [*[objects] * 4, len(candidates)]  # an object that is not missed has a candidate
    as_is, *others = ap(Kind.CORRECT, [None, *FALSE_KINDS[2:], None], counts)
    return np.array([*fixed, *others]) - as_is
