"""Small models with each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.models.detector import DetectionModel
from tessera.models.model_yaml import read_model

ROWS: dict[str, list[Any]] = {  # how each head ends a model; all but the first on one small body
    "Detect": [],
    "DetectFree": ["nc"],
    "DetectYOLOX": ["nc"],
    "DetectYOLOv9": ["nc", 64],
}
ONCE = "DetectFree with one-to-one branches"
SIZE_HW = (64, 96)
each_head = pytest.mark.parametrize("name", (*ROWS, ONCE))


def made(name: str, nc: int = 4) -> DetectionModel:
    torch.manual_seed(0)
    if name == "Detect":
        return DetectionModel("yolov5n.yaml", nc=nc)
    described = dict(read_model("tessera-n.yaml", {"nc": nc}).plain)
    kind, arguments = ("DetectFree", ["nc", 16, 1, True]) if name == ONCE else (name, ROWS[name])
    described["head"][-1][2:] = [kind, arguments]
    return DetectionModel(described)


def images(batch: int) -> Tensor:
    return torch.rand(batch, 3, *SIZE_HW, generator=torch.Generator().manual_seed(1))


def weighted(targets: Tensor) -> Tensor:
    """The rows of `targets` (N, 6) with a weight, 1 of a region."""
    weights = torch.where(
        targets[:, 1] >= 0, torch.tensor([0.5, 1.0, 0.0, 0.25]).repeat(len(targets))[: len(targets)], 1
    )
    return torch.cat((targets, weights[:, None]), 1)


def shares_of(targets: Tensor, cuts: Sequence[range]) -> list[Tensor]:
    """The rows of `targets` whose image lies in each cut, with images numbered from the cut's first."""
    parts = [targets[(targets[:, 0] >= cut.start) & (targets[:, 0] < cut.stop)].clone() for cut in cuts]
    for cut, rows in zip(cuts, parts, strict=True):
        rows[:, 0] -= cut.start
    return parts
