"""Teacher of classes that images do not label: a frozen network whose class probabilities are the targets there."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.data.labels.classes import match_classes
from tessera.models.heads.criterion import A, Criterion, Taught
from tessera.models.heads.head import Head
from tessera.utils.checkpoints.weights import resolve_weights
from tessera.utils.config import AUTO, NO_TEACHER
from tessera.utils.engine.state import Teach, no_teacher
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.evaluation.network import Network, is_exported, open_model
from tessera.utils.ranks.world import World
from tessera.utils.text import first_of, shown
from tessera.utils.types import Batch, DatasetIndex

_DIGEST = re.compile(r"#[0-9a-f]{16}$")  # what a resolved `--teacher` ends in
log = logging.getLogger(__name__)


class Teacher:
    """Frozen network that predicts the classes of a training, matched by name, at the cells of the student's head."""

    def __init__(self, network: Network, names: Sequence[str], head: Head) -> None:
        device = network.accelerator.device
        numbers = torch.tensor(match_classes(network.names, names), device=device)
        self._network, self._strides = network, head.strides
        self._known, self._columns = numbers >= 0, numbers.clamp(min=0)

    @torch.no_grad()
    def __call__(self, assignment: A, batch: Batch, images: Tensor) -> A:
        """Add the teacher's targets to the assignment of a batch; `images` are float (B, 3, H, W) on the device.

        Images that label all classes are not computed.
        """
        rows = batch.targets[batch.targets[:, 1] < -1, 0].long().unique().to(images.device)
        if not len(rows):
            return assignment
        decoded = self._network(images[rows]).float()
        first = 5 if self._network.has_objectness else 4
        scores = decoded[..., first:].index_select(2, self._columns) * self._known
        if self._network.has_objectness:
            scores = scores * decoded[..., 4:5]
        scores = self._largest_of_cells(scores, (images.shape[2], images.shape[3]))
        probabilities = scores.new_zeros((len(images), *scores.shape[1:])).index_copy_(0, rows, scores)
        return replace(assignment, taught=Taught(probabilities, self._known))

    def _largest_of_cells(self, scores: Tensor, size_hw: tuple[int, int]) -> Tensor:
        """Return the largest scores of each cell, (B, A, C), of predictions (B, k · A, C), level by level."""
        cells = [round(size_hw[0] / stride) * round(size_hw[1] / stride) for stride in self._strides]
        each, rest = divmod(scores.shape[1], sum(cells))
        if rest or not each:
            raise UserError(
                f"--teacher {self._network.source}: found {scores.shape[1]:,} predictions for {size_hw[1]} × "
                f"{size_hw[0]} px, expected those of strides {', '.join(f'{s:g}' for s in self._strides)}. Give "
                "another teacher, or --teacher none."
            )
        levels = scores.split([each * count for count in cells], 1)
        return torch.cat([level.unflatten(1, (each, -1)).amax(1) for level in levels], 1)


def choose_teacher(
    given: str, weights: str, known: Sequence[str], index: DatasetIndex, criterion: Criterion[Any], world: World
) -> str:
    """Return `--teacher` with the digest of its file; NO_TEACHER without one. Every rank calls this.

    Args:
        given: the flag; of a resumed run with the digest, which must still be that of the file.
        weights, known: initial weights of the run and their classes, which "auto" stands for.
        index: training images.
        criterion: of the model.

    Raises:
        UserError: no such file, another one than at the start, or nothing for it to teach.
    """
    if given == AUTO:
        given = weights if criterion.takes_teacher and _wanted(index, known) else NO_TEACHER
    if given == NO_TEACHER:
        return NO_TEACHER
    if not len(index.set_of_image):
        raise ConfigError(
            f"--teacher {given}: all images label all classes, so that it has nothing to teach. Name the labelled "
            "classes in the dataset YAML (`labelled`), or omit the flag."
        )
    if not criterion.takes_teacher:
        raise ConfigError(
            f"--teacher {given}: the loss of this model's head takes no teacher. Choose a model that ends in "
            "DetectFree, DetectYOLOv9 or DetectYOLOX, or --teacher none."
        )
    name = _DIGEST.sub("", given)
    found = f"{name}#{world.run_on_main(lambda: _digest(name))}"
    if found != given != name:
        raise UserError(f"--teacher {name}: the file has changed since the start of the run. Restore it to resume.")
    return found


def open_teacher(chosen: str, index: DatasetIndex, head: Head, world: World, *, half: bool = False) -> Teach:
    """Open the result of `choose_teacher`, and return what adds its targets to an assignment. Every rank calls this.

    `half` computes a checkpoint in the accelerator's 16-bit type.

    Raises:
        UserError: it is no network, or knows no class that some image does not label.
    """
    if chosen == NO_TEACHER:
        return no_teacher
    name = _DIGEST.sub("", chosen)
    network = open_model(name, world, half=half and not is_exported(name))
    taught = _wanted(index, network.names)
    if not isinstance(network, Network) or not taught:
        lacking = [shown(own) for own in _wanted(index, index.names)]
        raise UserError(
            f"--teacher {name}: expected a network that knows a class which some image does not label "
            f"({first_of(lacking, 5)}). Give another one, or --teacher none."
        )
    log.info(f"Teacher: {name} teaches {first_of(list(map(shown, taught)), 5)} where images do not label them.")
    return Teacher(network, index.names, head)


def _wanted(index: DatasetIndex, known: Sequence[str]) -> list[str]:
    """Return the classes that some image does not label and that a network knows."""
    unlabelled = np.flatnonzero(index.unlabelled_sets.any(0)).tolist()
    numbers = match_classes(known, index.names)
    return [index.names[own] for own in unlabelled if numbers[own] >= 0]


def _digest(name: str) -> str:
    """Return the digest of a checkpoint or exported file, or of the files of an exported folder."""
    try:
        path = Path(name) if is_exported(name) else resolve_weights(name)
    except UserError as error:
        raise UserError(str(error).replace("--weights", "--teacher", 1)) from error
    if not path.exists():
        raise UserError(f"--teacher {name}: no such file or folder, expected a checkpoint or an exported file.")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    state = hashlib.blake2b(digest_size=8)
    for file in files:
        state.update(file.read_bytes())
    return state.hexdigest()
