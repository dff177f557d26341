"""A head of three levels, predictions and targets, for the tests of the anchor-free head."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tessera.models.heads.free import DetectFree, default_branches
from tessera.models.heads.task_aligned import TaskAlignedLoss
from tessera.utils.config import Hyp, load_hyp
from tests.models.heads.free.oracle import STRIDES, cells_of

SIZE_HW = (64, 96)
SHAPES_HW = [(SIZE_HW[0] // s, SIZE_HW[1] // s) for s in STRIDES]
A = len(cells_of(SIZE_HW)[0])
HYP: Hyp = dataclasses.replace(load_hyp("hyp.scratch-low.yaml"), box=7.5, cls=0.5)


def made_head(nc: int = 5, reg_max: int = 16, end2end: bool = False) -> DetectFree:
    sets = [default_branches(nc, (8, 8, 8), STRIDES, reg_max) for _ in range(2 if end2end else 1)]
    return DetectFree(nc, STRIDES, reg_max, *sets)


def features(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What such a head reads of two images."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 8, *shape, generator=generator).to(dtype) for shape in SHAPES_HW]


def raw_predictions(batch_size: int, nc: int = 5, reg_max: int = 16, seed: int = 0) -> list[Tensor]:
    """Boxes of some four strides, and classes, at random."""
    generator = torch.Generator().manual_seed(seed)
    cells = len(cells_of(SIZE_HW)[0])
    fall = -0.4 * torch.arange(reg_max).repeat(4) if reg_max > 1 else 2
    boxes = torch.randn(batch_size, cells, 4 * reg_max, generator=generator) + fall
    return [boxes.requires_grad_(), torch.randn(batch_size, cells, nc, generator=generator).requires_grad_()]


def random_targets(count: int, batch_size: int, nc: int = 5, seed: int = 0) -> Tensor:
    """Rows image, class, corners, of objects from 2 to 60 px, some beyond the border."""
    generator = torch.Generator().manual_seed(seed)
    height, width = SIZE_HW
    image = torch.randint(0, batch_size, (count, 1), generator=generator)
    label = torch.randint(0, nc, (count, 1), generator=generator)
    centre = torch.rand(count, 2, generator=generator) * torch.tensor([width, height])
    half = torch.rand(count, 2, generator=generator) * 29 + 1
    return torch.cat((image, label, centre - half, centre + half), 1)


def matched(criterion: TaskAlignedLoss, predictions: list[Tensor], targets: Tensor) -> dict[tuple[int, int], float]:
    """(image, cell) to target score."""
    assignment = criterion.assign(targets, len(predictions[0]), SIZE_HW)
    ((_, slots),) = criterion.assign_cells(predictions, assignment)
    used = slots.targets > 0
    places = [divmod(cell, A) for cell in slots.cells[used].tolist()]
    assert len(set(places)) == len(places), "a cell is used twice"
    return dict(zip(places, slots.targets[used].tolist(), strict=True))
