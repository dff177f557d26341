"""What holds for losses under the task-aligned assignment: who is matched, and that a batch's cuts add up to it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tessera.models.heads.free.aligned import UNIT, AlignedLoss
from tests.models.heads.free.made import SIZE_HW
from tests.models.heads.free.oracle import cells_of
from tests.models.heads.shares import shares_of

A = len(cells_of(SIZE_HW)[0])


def matched(criterion: AlignedLoss, predictions: list[Tensor], targets: Tensor) -> dict[tuple[int, int], float]:
    """(image, cell) to target score."""
    assignment = criterion.assign(targets, len(predictions[0]), SIZE_HW)
    _, (branch,) = criterion._match(predictions, assignment)
    used = branch[1].targets > 0
    places = [divmod(cell, A) for cell in branch[1].cells[used].tolist()]
    assert len(set(places)) == len(places), "a cell is used twice"
    return dict(zip(places, branch[1].targets[used].tolist(), strict=True))


def assert_cuts_add_up(criterion: AlignedLoss, whole: list[Tensor], targets: Tensor, cuts: Sequence[range]) -> None:
    """Matches, the sum that ranks send, losses and gradients of a batch's cuts are together those of the batch."""
    loss, parts = criterion(whole, criterion.assign(targets, len(whole[0]), SIZE_HW))
    expected = torch.autograd.grad(loss, whole)
    scores = matched(criterion, whole, targets)

    asked: list[Tensor] = []
    units = 0
    shares = []
    for cut, rows in zip(cuts, shares_of(targets, cuts), strict=True):
        mine = [p.detach()[cut.start : cut.stop].requires_grad_() for p in whole]
        shares.append((cut, mine, criterion.assign(rows, len(cut), SIZE_HW)))
        found = matched(criterion, mine, rows)
        assert found == pytest.approx({(i - cut.start, c): t for (i, c), t in scores.items() if i in cut}, rel=1e-5)
        units += sum(round(score * UNIT) for score in found.values())
        criterion(mine, shares[-1][2], None, lambda units: asked.append(units) or (lambda: units))
    total = torch.stack(asked).sum(0)
    assert total.dtype == torch.int64 and total.shape == (1,)
    assert int(total) == units, "whole numbers add up exactly"
    found_parts = torch.zeros_like(parts)
    for cut, mine, assignment in shares:
        part, its_parts = criterion(mine, assignment, None, lambda units: lambda: total)
        found_parts += its_parts
        for grad, wanted in zip(torch.autograd.grad(part, mine), expected, strict=True):
            torch.testing.assert_close(grad, wanted[cut.start : cut.stop], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(found_parts, parts, rtol=1e-5, atol=1e-8)
