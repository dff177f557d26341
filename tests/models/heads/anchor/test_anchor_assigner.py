"""Target assignment of the anchor-based head, compared with reference values and plain loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.models.heads.anchor_loss import AnchorLoss
from tessera.models.heads.criterion import LossSettings
from tessera.utils.config import Hyp, load_hyp
from tests.models.heads.anchor.loss_oracle import oracle_assignment
from tests.models.heads.anchor.made_loss import SIZE_HW, Head, grid_anchors, random_targets, reference_targets


def test_assignment_equals_the_reference(shared: Path, hyp: Hyp) -> None:
    expected = np.load(shared / "reference" / "assign.npz")
    assignment = AnchorLoss(Head(), LossSettings.of(hyp, imgsz=256)).assign(reference_targets(shared), 4, (256, 256))
    taken = assignment.cells[:, assignment.positive_cells].T
    split = [t.split(assignment.positives_per_level) for t in (taken, assignment.boxes, assignment.classes)]
    anchors = assignment.anchors.split(assignment.positives_per_level)
    for level in range(3):
        ours = np.column_stack((split[0][level], split[2][level], anchors[level], split[1][level]))
        theirs = np.column_stack([expected[f"{part}{level}"] for part in ("idx", "cls", "anchor", "box")])
        assert ours.shape == theirs.shape
        by_value = [rows[np.lexsort(rows.round(3).T[::-1])] for rows in (ours, theirs)]
        np.testing.assert_allclose(*by_value, atol=2e-5)


COORDINATES = st.integers(0, 4 * 96).map(lambda quarter: quarter / 4)  # whole cells and their halves come up often


@st.composite
def target_rows(draw: st.DrawFn) -> list[float]:
    x1, x2 = sorted(min(draw(COORDINATES), SIZE_HW[1]) for _ in range(2))
    y1, y2 = sorted(min(draw(COORDINATES), SIZE_HW[0]) for _ in range(2))
    return [draw(st.integers(0, 1)), draw(st.integers(0, 4)), x1, y1, x2, y2]


@settings(max_examples=150, deadline=None)
@given(st.lists(target_rows(), max_size=6))
def test_assignment_equals_three_plain_loops(rows: list[list[float]]) -> None:
    targets = torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)
    assignment = AnchorLoss(Head(), LossSettings.of(load_hyp("hyp.scratch-low.yaml"), imgsz=96)).assign(
        targets, 2, SIZE_HW
    )
    expected = oracle_assignment(targets, 4.0, SIZE_HW)
    assert assignment.positives_per_level == tuple(map(len, expected))

    taken = assignment.cells[:, assignment.positive_cells].T.tolist()
    flat = [candidate for level in expected for candidate in level]
    assert taken == [list(candidate[:4]) for candidate in flat]
    assert assignment.classes.tolist() == [int(rows[candidate[4]][1]) for candidate in flat]

    first = 0
    last_positives = assignment.last_positives.split(assignment.cells_per_level)
    cells = assignment.cells.split(assignment.cells_per_level, dim=1)
    for level, level_last, level_cells in zip(expected, last_positives, cells, strict=True):
        last = {candidate[:4]: first + position for position, candidate in enumerate(level)}
        assert dict(zip(map(tuple, level_cells.T.tolist()), level_last.tolist(), strict=True)) == last
        first += len(level)


def test_anchors_set_after_the_criterion_was_built_count(hyp: Hyp) -> None:
    head = Head()
    criterion = AnchorLoss(head, LossSettings.of(hyp, imgsz=96))
    targets = random_targets(25, 2, SIZE_HW, 5)
    criterion.assign(targets, 2, SIZE_HW)
    head.load_state_dict({"anchors": grid_anchors() * 1.7}, strict=False)
    expected = AnchorLoss(head, LossSettings.of(hyp, imgsz=96)).assign(targets, 2, SIZE_HW)
    assert torch.equal(criterion.assign(targets, 2, SIZE_HW).anchors, expected.anchors)
    head.anchors = grid_anchors()  # as `module.to(device)` replaces a buffer
    expected = AnchorLoss(Head(), LossSettings.of(hyp, imgsz=96)).assign(targets, 2, SIZE_HW)
    assert torch.equal(criterion.assign(targets, 2, SIZE_HW).anchors, expected.anchors)
