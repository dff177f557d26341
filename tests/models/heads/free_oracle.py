"""An anchor-free head of three levels, predictions and targets; oracle of its loss: every object against every cell."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_iou

from tessera.models.heads.free import DetectFree, default_branches
from tessera.models.heads.task_aligned import TaskAlignedLoss
from tessera.utils.boxes import complete_iou, xyxy_to_cxcywh
from tessera.utils.config import Hyp, load_hyp

STRIDES = (8, 16, 32)


class Claim(NamedTuple):
    """What a cell is trained for: a row of the targets, the alignment and the IoU."""

    target: int
    alignment: float
    overlap: float


def cells_of(size_hw: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Centres (A, 2) and strides (A,) of all cells."""
    height, width = size_hw
    rows = [(x + s / 2, y + s / 2, s) for s in STRIDES for y in range(0, height, s) for x in range(0, width, s)]
    found = torch.tensor(rows, dtype=torch.float64)
    return found[:, :2], found[:, 2]


def decode(boxes: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """Raw boxes (B, A, 4 R) to corners in pixels."""
    centres, strides = cells_of(size_hw)
    reg_max = boxes.shape[2] // 4
    sides = boxes.double().view(*boxes.shape[:2], 4, reg_max)
    distance = (sides.softmax(3) * torch.arange(reg_max)).sum(3) if reg_max > 1 else sides[..., 0]
    distance = distance * strides[:, None]
    return torch.cat((centres - distance[..., :2], centres + distance[..., 2:]), 2)


def inside(box_xyxy: Tensor, centres: Tensor) -> Tensor:
    """Cells (A,) whose centre lies in an object; a side below 8 px counts as 16 px."""
    found = torch.ones(len(centres), dtype=torch.bool)
    for axis in (0, 1):
        low, high = float(box_xyxy[axis]), float(box_xyxy[axis + 2])
        if high - low < 8:
            low, high = (low + high) / 2 - 8, (low + high) / 2 + 8
        found &= (centres[:, axis] >= low) & (centres[:, axis] < high)
    return found


def weight_of(row: Tensor) -> float:
    """Weight of an object, 1 in rows without a seventh number."""
    return float(row[6]) if len(row) > 6 else 1.0


def weights_around(targets: Tensor, batch_size: int, size_hw: tuple[int, int]) -> Tensor:
    """Least weight of the objects around each cell, (B, A)."""
    centres, _ = cells_of(size_hw)
    found = torch.ones(batch_size, len(centres), dtype=torch.float64)
    for row in targets:
        around = found[int(row[0])]
        around[inside(row[2:6].double(), centres) & (around > weight_of(row))] = weight_of(row)
    return found


def oracle_targets(
    predictions: list[Tensor], targets: Tensor, hyp: Hyp, size_hw: tuple[int, int]
) -> dict[tuple[int, int], tuple[int, float]]:
    """(image, cell) to (row of the targets, target score), of raw boxes and classes."""
    return aligned_targets(decode(predictions[0], size_hw), predictions[1].double().sigmoid(), targets, hyp, size_hw)


def aligned_targets(
    boxes: Tensor, scores: Tensor, targets: Tensor, hyp: Hyp, size_hw: tuple[int, int]
) -> dict[tuple[int, int], tuple[int, float]]:
    """(image, cell) to (row of the targets, target score), of corners (B, A, 4) and probabilities (B, A, C)."""
    centres, _ = cells_of(size_hw)
    claims: dict[tuple[int, int], Claim] = {}
    for number, row in enumerate(targets.double()):
        image, label = int(row[0]), int(row[1])
        overlap = box_iou(boxes[image], row[None, 2:6])[:, 0]
        alignment = scores[image, :, label] ** hyp.alpha * overlap**hyp.beta
        candidates = inside(row[2:6], centres).nonzero()[:, 0].tolist()
        candidates = sorted(candidates, key=lambda cell: -float(alignment[cell]))[: round(hyp.topk)]
        for cell in candidates:
            claim = Claim(number, float(alignment[cell]), float(overlap[cell]))
            before = claims.get((image, cell))
            others = before.overlap * weight_of(targets[before.target]) if before else -1
            if claim.alignment > torch.finfo(torch.float32).tiny and claim.overlap * weight_of(row) > others:
                claims[image, cell] = claim
    found = {}
    for place, claim in claims.items():
        mine = [other for other in claims.values() if other.target == claim.target]
        largest = max(other.alignment for other in mine)
        found[place] = claim.target, claim.alignment / largest * max(other.overlap for other in mine)
    return found


def oracle_loss(
    predictions: list[Tensor], targets: Tensor, hyp: Hyp, size_hw: tuple[int, int], class_weights: Sequence[float] = ()
) -> Tensor:
    """The three parts (3,) of the loss of a batch."""
    boxes, logits = predictions
    class_weights = class_weights or [1.0] * logits.shape[2]
    reg_max = boxes.shape[2] // 4
    centres, strides = cells_of(size_hw)
    found = decode(boxes, size_hw)
    truth = torch.zeros_like(logits, dtype=torch.float64)
    cell_weights = weights_around(targets, len(boxes), size_hw)
    box = distance = torch.zeros((), dtype=torch.float64)
    matches = oracle_targets([p.detach() for p in predictions], targets, hyp, size_hw)
    for (image, cell), (number, score) in matches.items():
        wanted, weight = targets[number, 2:6].double(), weight_of(targets[number])
        truth[image, cell, int(targets[number, 1])] = score
        cell_weights[image, cell] = class_weights[int(targets[number, 1])] * weight
        score *= weight
        pair = (xyxy_to_cxcywh(corners / strides[cell])[None] for corners in (found[image, cell], wanted))
        box = box + score * (1 - complete_iou(*pair)[0])
        sides = torch.cat((centres[cell] - wanted[:2], wanted[2:] - centres[cell])) / strides[cell]
        for side, raw in zip(sides.tolist(), boxes[image, cell].double().view(4, reg_max), strict=True):
            if reg_max == 1:
                distance = distance + score * (raw[0] - side).abs() / 4
                continue
            side = min(max(side, 0.0), reg_max - 1.01)
            lower = int(side)
            shares = torch.zeros(reg_max, dtype=torch.float64)
            shares[lower], shares[lower + 1] = lower + 1 - side, side - lower
            distance = distance + score * F.cross_entropy(raw, shares) / 4
    cls = F.binary_cross_entropy_with_logits(logits.double(), truth, cell_weights[..., None], reduction="sum")
    total = max(sum(score * weight_of(targets[number]) for number, score in matches.values()), 1)
    return torch.stack((hyp.box * box, hyp.cls * cls, hyp.dfl * distance)) / total


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
    used = slots.target_scores > 0
    places = [divmod(cell, A) for cell in slots.cells[used].tolist()]
    assert len(set(places)) == len(places), "a cell is used twice"
    return dict(zip(places, slots.target_scores[used].tolist(), strict=True))
