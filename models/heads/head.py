"""Interface of detection heads, through which the rest of the program uses them.

Legend: B images, L detection levels, A rows of an image over all levels, C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tessera.models.heads.criterion import LOSS_HYPS, Criterion, LossSettings
from tessera.models.layers.yaml_arguments import Reader
from tessera.utils.errors import ConfigError

Output = list[Tensor] | tuple[Tensor, list[Tensor]]  # raw outputs in training mode, (decoded, raw) in evaluation mode
OBJECTS, OBJECTS_PX = 8, 640  # assumed objects per image, and its side in pixels


def object_prior(stride: float) -> float:
    """Return the prior fraction of a level's cells with an object, from which heads start (Lin et al. 2017, 3.3)."""
    return OBJECTS / (OBJECTS_PX / stride) ** 2


Words = tuple[str, ...]


class Recipes(NamedTuple):
    """Recipes of a head's models, each as the words of --hyp: a complete file first."""

    long: Words  # of long runs
    new: Words  # of short ones from weights of other classes
    short: Words  # of short ones, from scratch or from weights pretrained on synthetic shapes
    known: Words  # from weights with all classes of the data
    backbone: Words  # from a classifier's backbone


@dataclass(frozen=True)
class HeadSpec:
    """A model YAML's description of its head, and of the maps that the head reads."""

    nc: int
    arguments: tuple[Any, ...]  # of the head's row, as written
    keys: Mapping[str, Any]  # the head's own keys of the YAML (`Head.yaml_keys`), read by their readers
    channels: tuple[int, ...]  # of each map
    strides: tuple[float, ...]  # pixels per cell of each map, whole numbers
    where: str  # position of the head's row, for messages


class Head(nn.Module, ABC):
    """Last layer of a model: from L maps to predictions, with the loss that trains it.

    In training mode, the forward returns raw outputs for the head's criterion. In evaluation mode it returns (decoded,
    raw). `decoded` is float32 (B, A, 4 + C), or (B, A, 5 + C) with objectness: rows of centre x, centre y, width,
    height in pixels, [objectness,] class probabilities; level by level.
    """

    has_objectness: ClassVar[bool] = False  # whether decoded rows have an objectness between box and classes
    recipes: ClassVar[Recipes] = Recipes(
        ("hyp.scratch-low.yaml",),
        ("hyp.short.yaml",),
        ("hyp.short.yaml", "optimizer=Muon"),
        ("hyp.known.yaml",),
        ("hyp.short.yaml",),
    )
    # Required top-level keys of a model YAML that only this head has, with their readers.
    yaml_keys: ClassVar[Mapping[str, Reader]] = MappingProxyType({})
    # Buffers from the YAML, which pretrained weights do not replace if the user sets them.
    yaml_tensors: ClassVar[tuple[str, ...]] = ()
    outputs_before_classes: ClassVar[int] = 0  # outputs of the class layers before the classes, per row

    rows_per_cell: int = 1  # decoded rows
    needs_nms: bool = True  # whether several rows predict an object, so that NMS is needed

    def __init__(self, nc: int, strides: Sequence[float]) -> None:
        super().__init__()
        self.nc = nc
        self.strides = tuple(map(float, strides))

    @classmethod
    @abstractmethod
    def from_spec(cls, spec: HeadSpec) -> Head:
        """Build the head that a model YAML describes; raise ConfigError if the description is invalid."""

    @classmethod
    def loss_hyps(cls, nc: int) -> frozenset[str]:
        """Return those of `LOSS_HYPS` that this head and its loss read with `nc` classes; by default all."""
        return LOSS_HYPS

    @abstractmethod
    def forward(self, features: list[Tensor]) -> Any:
        """Predict from L maps (B, channels, ny, nx)."""

    @abstractmethod
    def class_layers(self) -> list[str]:
        """Return the names of the last class convolutions (`outputs_before_classes` + C outputs per row of a cell)."""

    def class_tensors(self, offered: Mapping[str, Tensor], nc: int, known: Sequence[int]) -> dict[str, Tensor]:
        """Return the class layers' tensors, with outputs of common classes copied from another head of this type.

        Args:
            offered: tensors of the other head by name.
            nc: number of classes of the other head.
            known: (C,), index of each class there; -1 = absent, so that its outputs stay as they are.

        Returns:
            Copies by name; none for layers of another shape.
        """
        ours = [number for number, other in enumerate(known) if other >= 0]
        theirs = [known[number] for number in ours]
        groups, first = self.rows_per_cell, self.outputs_before_classes
        own, copies = self.state_dict(), dict[str, Tensor]()
        for name in (f"{layer}.{kind}" for layer in self.class_layers() for kind in ("weight", "bias")):
            if name not in offered or offered[name].shape != (groups * (first + nc), *own[name].shape[1:]):
                continue
            mine, other = (t.unflatten(0, (groups, -1)) for t in (own[name].detach().clone(), offered[name]))
            mine[:, :first] = other[:, :first]
            mine[:, [first + number for number in ours]] = other[:, [first + number for number in theirs]].to(mine)
            copies[name] = mine.flatten(0, 1)
        return copies

    @abstractmethod
    def criterion(self, settings: LossSettings) -> Criterion[Any]:
        """Return the loss that trains this head."""

    def prepare(
        self, labels_wh: NDArray[np.floating], settings: LossSettings, rng: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """Return buffers of this head that fit a dataset better, such as anchors, by name; by default none.

        Args:
            labels_wh: (M, 2), sizes of training labels in pixels at the training size: a sample of a large dataset.
            settings: of the loss.
            rng: generator of the search; None = keep the model's.
        """
        return {}

    def strip_for_inference(self, *, end2end: bool) -> None:
        """Remove what only training needs; `end2end`: decode the branch that predicts each object once, without NMS.

        Raises:
            ConfigError: this head has no branch for `end2end`.
        """
        if end2end:
            raise ConfigError(
                f"--end2end: this model's {type(self).__name__} has no one-to-one branch. Omit the flag, or "
                "train a model with one: a YAML that ends in DetectFree, [nc, 16, 1, true]."
            )

    @property
    def priors(self) -> Tensor | None:
        """Anchors for the checkpoint's key "anchors"; None for a head without."""
        return None

    def grids_hw(self, size_hw: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return height and width of each level in cells, for images of (height, width) pixels."""
        return tuple((int(size_hw[0] // stride), int(size_hw[1] // stride)) for stride in self.strides)

    def nearest_row(self, level: int, wh: Tensor) -> Tensor:
        """Return which decoded row of a level's cell is for boxes most like sizes (…, 2) in pixels: int64 (…)."""
        return wh.new_zeros(wh.shape[:-1], dtype=torch.int64)

    def rows_per_level(self, size_hw: Sequence[int]) -> tuple[int, ...]:
        """Return the number of decoded rows of each level, for such images."""
        return tuple(self.rows_per_cell * ny * nx for ny, nx in self.grids_hw(size_hw))
