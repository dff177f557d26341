"""Teacher of classes that images do not label: a frozen network whose class probabilities are the targets there."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.data.labels.classes import has_placeholder_names, match_classes
from tessera.models.heads.criterion import A, Criterion, Taught
from tessera.models.heads.head import Head
from tessera.utils.checkpoints.weights import load_weights, model_of_weights, resolve_weights
from tessera.utils.config import AUTO, NO_TEACHER, split_teacher
from tessera.utils.engine.precision import Precision
from tessera.utils.engine.state import Teach, no_teacher
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.evaluation.network import Network, network_of_weights
from tessera.utils.files import user_path
from tessera.utils.ranks.world import World
from tessera.utils.text import first_of, shown
from tessera.utils.thresholds import DEFAULT_CONF, class_thresholds
from tessera.utils.types import Batch, DatasetIndex

log = logging.getLogger(__name__)


class Teacher:
    """Frozen network that predicts the classes of a training, matched by name, at the cells of the student's head.

    Of classes whose best F1 in its validation is at a confidence below DEFAULT_CONF, it raises the scores, such that
    this confidence becomes DEFAULT_CONF: the student would learn to be as timid.
    """

    def __init__(self, network: Network, names: Sequence[str], head: Head) -> None:
        self._network, self._head = network, head
        numbers = torch.tensor(match_classes(network.names, names), device=network.accelerator.device)
        self._known, self._columns = numbers >= 0, numbers.clamp(min=0)
        found = network.class_confidences or (DEFAULT_CONF,) * network.nc
        best = torch.tensor(class_thresholds(found, DEFAULT_CONF), dtype=torch.float32)
        odds = best.clamp(max=DEFAULT_CONF).logit().neg().exp() * DEFAULT_CONF / (1 - DEFAULT_CONF)
        self._odds = odds.to(numbers.device)[self._columns]  # (C,), factors of the odds of a score, at least 1

    @torch.no_grad()
    def __call__(self, assignment: A, batch: Batch, images: Tensor) -> A:
        """Add the teacher's targets to the assignment of a batch; `images` are float (B, 3, H, W) on the device.

        Images that label all classes are not computed.
        """
        rows = batch.targets[batch.targets[:, 1] < -1, 0].long().unique()
        if not len(rows):
            return assignment
        accelerator = self._network.accelerator
        rows = accelerator.send(rows)
        with accelerator.without_kernel_benchmark():  # their number varies
            decoded = self._network(images[rows]).float()
        boxes, scores = decoded[..., :4], decoded[..., 5 if self._network.has_objectness else 4 :]
        scores = scores.index_select(2, self._columns) * self._known
        if self._network.has_objectness:
            scores = scores * decoded[..., 4:5]
        scores = scores * self._odds / (1 + scores * (self._odds - 1))
        found = self._of_student(torch.cat((boxes, scores), 2), images.shape[2:])
        found = found.new_zeros((len(images), *found.shape[1:])).index_copy_(0, rows, found)
        return assignment.with_teacher(Taught(found[..., 4:], self._known, found[..., :4]))

    def _of_student(self, found: Tensor, size_hw: Sequence[int]) -> Tensor:
        """Return boxes and scores of the student's predictions, (B, r · A, 4 + C), of (B, k · A, 4 + C) by level.

        If a cell has as many of both, they correspond. Otherwise the best of the teacher's goes to the student's for
        boxes most like its own, since others would be worse; those get zeros.
        """
        head, cells = self._head, [ny * nx for ny, nx in self._head.grids_hw(size_hw)]
        each = found.shape[1] // sum(cells)
        if each == head.rows_per_cell:
            return found
        levels = []
        for level, own in enumerate(found.split([each * count for count in cells], 1)):
            own = own.unflatten(1, (each, -1))
            own = torch.take_along_dim(own, own[..., 4:].amax(3).argmax(1)[:, None, :, None], 1)
            row = F.one_hot(head.nearest_row(level, own[:, 0, :, 2:4]), head.rows_per_cell)
            levels.append((own * row.transpose(1, 2)[..., None]).flatten(1, 2))
        return torch.cat(levels, 1)


def choose_teacher(
    given: str, weights: str, known: Sequence[str], index: DatasetIndex, criterion: Criterion[Any], world: World
) -> str:
    """Return `--teacher` as an absolute path or published name with the digest of its file; NO_TEACHER without one.

    Every rank calls this.

    Args:
        given: the flag; of a resumed run with the digest, which must still be that of the file.
        weights, known: initial weights of the run and their classes, which "auto" stands for.
        index: training images.
        criterion: of the model.

    Raises:
        UserError: no such file, another one than at the start, or nothing for it to teach.
    """
    if given == AUTO:
        named = not (has_placeholder_names(known) or has_placeholder_names(index.names))
        given = weights if named and criterion.takes_teacher and _taught(index, known) else NO_TEACHER
    if given == NO_TEACHER:
        objects = np.bincount(index.classes, minlength=len(index.names))
        untaught = [shown(own) for own in _taught(index, index.names) if not objects[index.names.index(own)]]
        if untaught:
            log.warning(
                f"Without a --teacher, classes without a labelled object are forgotten: {first_of(untaught, 5)}."
            )
        return NO_TEACHER
    name, digest = split_teacher(given)
    if not len(index.set_of_image):
        raise ConfigError(
            f"--teacher {name}: all images label all classes, so that it has nothing to teach. Name the labelled "
            "classes in the dataset YAML (`labelled`), or omit the flag."
        )
    if not criterion.takes_teacher:
        raise ConfigError(
            f"--teacher {name}: the loss of this model's head takes no teacher. Let it read `taught` of its assignment "
            "and set `takes_teacher`, or give --teacher none."
        )
    path = user_path(name, "--teacher")
    name = str(path.absolute()) if path.is_file() else name
    found = f"#{world.run_on_main(lambda: _digest(name))}"
    if digest not in ("", found):
        raise UserError(
            f"--teacher {name}: found another file than at the start of the run. To resume, omit the flag, or give the "
            "path of the same file."
        )
    return name + found


def open_teacher(
    chosen: str, index: DatasetIndex, head: Head, world: World, dtype: torch.dtype = torch.float32
) -> Teach:
    """Open the result of `choose_teacher`, and return what adds its targets to an assignment. Every rank calls this.

    It computes in `dtype`.

    Raises:
        UserError: it is of other strides, or knows no class that some image does not label.
    """
    if chosen == NO_TEACHER:
        if head.has_objectness and index.set_of_image.min(initial=0) >= 0 and len(index.set_of_image):
            log.warning(
                "train: every image labels some classes only, so nothing teaches the objectness of this model: give a "
                "--teacher, or use a model without objectness such as tessera-n."
            )
        return no_teacher
    name, _ = split_teacher(chosen)
    with _as_teacher():
        loaded = world.run_on_main(lambda: load_weights(resolve_weights(name)))
        model = model_of_weights(loaded, name)
    model.head.strip_for_inference(end2end=False)
    wanted, taught = _taught(index, index.names), _taught(index, model.names)
    if not taught:
        raise UserError(
            f"--teacher {name}: expected a detector that knows a class which some image does not label "
            f"({first_of(list(map(shown, wanted)), 5)}). Give another one, or --teacher none."
        )
    if model.head.strides != head.strides:
        theirs, ours = (", ".join(f"{stride:g}" for stride in each.strides) for each in (model.head, head))
        raise UserError(
            f"--teacher {name}: found strides of {theirs} px, expected {ours} as of this model. Give another one, or "
            "--teacher none."
        )
    log.info(f"Teacher: {name} teaches {first_of(list(map(shown, taught)), 5)} where images do not label them.")
    if head.has_objectness and len(taught) < len(wanted):
        log.warning(
            f"--teacher {name}: it does not know all of {first_of(list(map(shown, wanted)), 5)}. Where one of the "
            "others is not labelled, it teaches nothing to this model, which has an objectness."
        )
    precision = Precision(world.accelerator, dtype)
    network = network_of_weights(model, loaded, world.accelerator, precision=precision)
    return Teacher(network, index.names, head)


def _taught(index: DatasetIndex, known: Sequence[str]) -> list[str]:
    """Return the classes that some image does not label and that a network knows."""
    unlabelled = np.flatnonzero(index.unlabelled_sets.any(0)).tolist()
    numbers = match_classes(known, index.names)
    return [index.names[own] for own in unlabelled if numbers[own] >= 0]


def _digest(name: str) -> str:
    with _as_teacher():
        return hashlib.blake2b(resolve_weights(name).read_bytes(), digest_size=8).hexdigest()


@contextmanager
def _as_teacher() -> Iterator[None]:
    """Let errors about weights name the flag."""
    try:
        yield
    except UserError as error:
        raise type(error)(str(error).replace("--weights", "--teacher")) from error
