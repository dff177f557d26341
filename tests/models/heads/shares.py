"""The shares of a batch that ranks take."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def shares_of(targets: Tensor, cuts: Sequence[range]) -> list[Tensor]:
    """The rows of `targets` (N, 6) whose image lies in each cut, with images numbered from the cut's first."""
    parts = [targets[(targets[:, 0] >= cut.start) & (targets[:, 0] < cut.stop)].clone() for cut in cuts]
    for cut, rows in zip(cuts, parts, strict=True):
        rows[:, 0] -= cut.start
    return parts
