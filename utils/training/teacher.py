"""Teacher of classes that images do not label: a frozen network whose class probabilities are the targets there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tessera.data.labels.classes import match_classes
from tessera.models.heads.criterion import A, Taught
from tessera.models.heads.head import Head
from tessera.utils.config import AUTO, TrainConfig
from tessera.utils.errors import UserError
from tessera.utils.evaluation.network import Network, open_model
from tessera.utils.ranks.world import World
from tessera.utils.text import first_of, shown
from tessera.utils.types import Batch, DatasetIndex

log = logging.getLogger(__name__)


class Teacher:
    """Frozen network that predicts classes of a training, matched by name, at the cells of the student's head."""

    def __init__(self, network: Network, names: Sequence[str], head: Head) -> None:
        number = match_classes(network.names, names)
        self.known = torch.tensor([own >= 0 for own in number])
        self._columns = torch.tensor([max(own, 0) for own in number], device=network.accelerator.device)
        self._known_there = self.known.to(network.accelerator.device)
        self._network, self._head = network, head

    def teach(self, assignment: A, batch: Batch, images: Tensor) -> A:
        """Add the teacher's targets to the assignment of a batch; `images` are float (B, 3, H, W) on the device."""
        partly = batch.targets[:, 1] < -1
        if not partly.any():
            return assignment
        rows = batch.targets[partly, 0].long().unique().to(images.device)
        decoded = self._network(images[rows]).float()
        first = 5 if self._network.has_objectness else 4
        scores = decoded[..., first:].index_select(2, self._columns)
        if self._network.has_objectness:
            scores = scores * decoded[..., 4:5]
        scores = self._of_cells(scores, (images.shape[2], images.shape[3]))
        probabilities = scores.new_zeros((len(images), *scores.shape[1:])).index_copy_(0, rows, scores)
        return replace(assignment, taught=Taught(probabilities * self._known_there, self._known_there))

    def _of_cells(self, scores: Tensor, size_hw: tuple[int, int]) -> Tensor:
        """Return the largest score of each cell, (B, A, C), from those of all predictions, level by level."""
        cells = [round(size_hw[0] / s) * round(size_hw[1] / s) for s in self._head.strides]
        each, rest = divmod(scores.shape[1], sum(cells))
        if rest or not each:
            raise UserError(
                f"--teacher {self._network.source}: found {scores.shape[1]:,} predictions for an image of "
                f"{size_hw[1]} × {size_hw[0]} px, expected a multiple of {sum(cells):,}: strides of "
                f"{', '.join(f'{s:g}' for s in self._head.strides)} px. Choose another teacher, or --teacher none."
            )
        if each == 1:
            return scores
        levels = scores.split([each * count for count in cells], 1)
        return torch.cat([level.unflatten(1, (each, -1)).amax(1) for level in levels], 1)


def open_teacher(config: TrainConfig, index: DatasetIndex, head: Head, world: World) -> Teacher | None:
    """Open the teacher of `--teacher`; None where all images label all classes, or no teacher is wanted.

    Raises:
        UserError: the teacher cannot be read, or knows no class that some image does not label.
    """
    if not len(index.set_of_image) or config.teacher == "none":
        return None
    name = config.weights if config.teacher == AUTO else config.teacher
    if not name:
        return None
    network = open_model(name, world)
    wanted = index.unlabelled_sets.any(0)
    names = [own for own, is_wanted in zip(index.names, wanted.tolist(), strict=True) if is_wanted]
    known = [own for own, number in zip(names, match_classes(network.names, names), strict=True) if number >= 0]
    if not known or not isinstance(network, Network):
        if config.teacher == AUTO:
            return None
        raise UserError(
            f"--teacher {name}: it knows none of the classes that some images do not label "
            f"({first_of(list(map(shown, names)), 5)}). Give a network that does, or --teacher none."
        )
    log.info(f"Teacher: {name} teaches {first_of(list(map(shown, known)), 5)} where they are not labelled.")
    return Teacher(network, index.names, head)
