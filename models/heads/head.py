"""What a head must be, so that any can end a model without another line naming it.

Legend: B images, L detection levels, A rows of an image over all levels, C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from tessera.models.heads.criterion import Criterion
from tessera.models.layers.yaml_arguments import Reader
from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.errors import ConfigError
from tessera.utils.ranks.world import World

Output = list[Tensor] | tuple[Tensor, list[Tensor]]  # raw outputs in training mode, (decoded, raw) in evaluation mode
OBJECTS, OBJECTS_PX = 8, 640  # objects of a fresh dataset in an image of so many pixels a side


def object_share(stride: float) -> float:
    """Share of a level's cells that find an object in a fresh dataset, where heads start (Lin et al. 2017, 3.3)."""
    return OBJECTS / (OBJECTS_PX / stride) ** 2


class Recipes(NamedTuple):
    """Hyperparameter files (data/hyps) of a head's models."""

    long: str  # of long runs
    short: str  # of short ones, from scratch or from weights
    known: str  # of short ones from weights that know all of the data's classes
    body: str  # of short ones from a classifier's backbone


@dataclass(frozen=True)
class HeadSpec:
    """What a model YAML says of its head, and the maps that the head reads."""

    nc: int
    arguments: tuple[Any, ...]  # of the head's row, as written
    keys: Mapping[str, Any]  # the YAML's keys that are the head's own (`Head.yaml_keys`), checked by their readers
    channels: tuple[int, ...]  # of each map
    strides: tuple[float, ...]  # pixels a cell of each map, whole numbers
    where: str  # place of the head's row, for messages


class Head(nn.Module, ABC):
    """The last layer of a model: from L maps to predictions, with the loss that trains it.

    In training mode a forward returns raw outputs, made for the head's own criterion. In evaluation mode it returns
    (decoded, raw): `decoded` float32 (B, A, 4 + C), or (B, A, 5 + C) with objectness; rows of centre x, centre y,
    width, height in pixels, [objectness,] class probabilities; level by level.
    """

    has_objectness: ClassVar[bool] = False  # whether decoded rows have an objectness between box and classes
    recipes: ClassVar[Recipes] = Recipes("hyp.scratch-low.yaml", "hyp.short.yaml", "hyp.known.yaml", "hyp.short.yaml")
    # Required keys at the top of a model YAML that are this head's own, with their readers.
    yaml_keys: ClassVar[Mapping[str, Reader]] = MappingProxyType({})
    # Buffers that come from the YAML: where a user gives one, pretrained weights do not replace them.
    yaml_tensors: ClassVar[tuple[str, ...]] = ()
    outputs_before_classes: ClassVar[int] = 0  # of the class layers, for each of the `rows_per_cell`

    rows_per_cell: int = 1  # decoded
    needs_suppression: bool = True  # whether several rows predict an object, so that NMS must follow

    def __init__(self, nc: int, strides: Sequence[float]) -> None:
        super().__init__()
        self.nc = nc
        self.strides = tuple(map(float, strides))

    @classmethod
    @abstractmethod
    def from_spec(cls, spec: HeadSpec) -> Head:
        """The head that a model YAML describes; ConfigError where the description is wrong."""

    @abstractmethod
    def forward(self, features: list[Tensor]) -> Any:
        """Predict from L maps (B, channels, ny, nx)."""

    @abstractmethod
    def class_layers(self) -> list[str]:
        """Names of the convolutions to, for each of the `rows_per_cell`, `outputs_before_classes` and the classes."""

    def class_tensors(self, offered: Mapping[str, Tensor], nc: int, known: Sequence[int]) -> dict[str, Tensor]:
        """Return the tensors of the class layers with what another head of this kind knows of the same classes.

        Args:
            offered: tensors of the other head by name.
            nc: classes of the other head.
            known: (C,), number of each class there; -1 = it lacks the class, whose outputs stay as they are here.

        Returns:
            Copies by name; none where the other head's layers have another form.
        """
        ours = [number for number, other in enumerate(known) if other >= 0]
        theirs = [known[number] for number in ours]
        groups, first = self.rows_per_cell, self.outputs_before_classes
        own, found = self.state_dict(), dict[str, Tensor]()
        for name in (f"{layer}.{kind}" for layer in self.class_layers() for kind in ("weight", "bias")):
            if name not in offered or offered[name].shape != (groups * (first + nc), *own[name].shape[1:]):
                continue
            mine, other = (t.unflatten(0, (groups, -1)) for t in (own[name].detach().clone(), offered[name]))
            mine[:, :first] = other[:, :first]
            mine[:, [first + number for number in ours]] = other[:, [first + number for number in theirs]].to(mine)
            found[name] = mine.flatten(0, 1)
        return found

    @abstractmethod
    def criterion(
        self, hyp: Hyp, *, imgsz: int, label_smoothing: float = 0.0, class_weights: Tensor | None = None
    ) -> Criterion[Any]:
        """The loss that trains this head at `imgsz` pixels; `label_smoothing` is the ε of the class targets."""

    def prepare(self, labels_wh: NDArray[np.floating], config: TrainConfig, hyp: Hyp, world: World) -> None:
        """Fit to a dataset what the head assumes of it, in place and on every rank alike; here nothing.

        Every rank of a fresh run calls this once, before the model is on its device; a resumed run does not.
        `labels_wh`, (M, 2), are sizes of training labels in pixels at the training size: a sample of a large dataset.
        """
        return

    def keep_inference(self, *, end2end: bool) -> None:
        """Drop what training alone needs, for good; `end2end`: decode rows that predict each object once, without NMS.

        Raises:
            ConfigError: nothing of this head was trained for `end2end`.
        """
        if end2end:
            raise ConfigError(
                f"--end2end: this model's {type(self).__name__} has no one-to-one branch. Leave the flag out, or "
                "train a model with one: a YAML that ends in DetectFree, [nc, 16, 1, true]."
            )

    @property
    def priors(self) -> Tensor | None:
        """What the head assumes of the sizes of objects, for the checkpoint's key "anchors"; None where nothing."""
        return None

    def grids_hw(self, size_hw: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Height and width of each level in cells for images of (height, width) pixels, multiples of every stride."""
        return tuple((int(size_hw[0] // stride), int(size_hw[1] // stride)) for stride in self.strides)

    def rows_per_level(self, size_hw: Sequence[int]) -> tuple[int, ...]:
        """Decoded rows of each level for such images."""
        return tuple(self.rows_per_cell * ny * nx for ny, nx in self.grids_hw(size_hw))
