"""`--folds K`: the training of some weights again, K times, each time without a Kth of the images.

Each training is a process of its own, of train.py with `--resume auto`: what is finished is taken as it is, and what
was cut off goes on. It begins where the training of the weights began, not with them: they have seen every label.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.data.source.held_out import folds
from tessera.data.source.index import build_index
from tessera.utils.checkpoints.resolve import resolve_weights
from tessera.utils.checkpoints.resume import saved_config
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.config import TrainConfig
from tessera.utils.errors import ConfigError, Interrupted, UserError
from tessera.utils.files import atomic_write
from tessera.utils.flags.program import called, started_again
from tessera.utils.flags.val import ValConfig
from tessera.utils.runtime.open_model import is_exported
from tessera.utils.suspects.copy import write_copy
from tessera.utils.text import shown
from tessera.utils.types import DatasetIndex, DatasetSpec

_DATA, _STATE = "copy", "folds.json"
# Of each training: it leaves weights alone.
_OWN: dict[str, Any] = {"resume": "auto", "exist_ok": False, "nosave": False, "noplots": True, "noreport": True}
_OWN |= {"loggers": "none", "profile": False, "save_period": -1}

log = logging.getLogger(__name__)


class Fold(NamedTuple):
    """A part of the images, int64 ascending, and the weights that were trained on the others."""

    images: NDArray[np.int64]
    weights: Path


def training_again(config: ValConfig, ranks: int) -> TrainConfig | None:
    """With `--folds`, the flags of the training that made the weights; None without.

    Raises:
        UserError: the weights are not those of a training of this program, or this process is not alone.
    """
    if not config.folds:
        return None
    if ranks > 1:
        raise ConfigError(
            f"--folds {config.folds} on {ranks} ranks: each fold is a training of its own, which one process starts. "
            f"Start {called('val.py')} without a launcher; several GPUs can share the trainings of its folder: "
            "docs/labels.md."
        )
    weights = config.weights
    known = None if is_exported(weights) else load_weights(resolve_weights(weights)).checkpoint
    if known is None:
        raise UserError(
            f"--folds: --weights {weights} does not say how it was trained, so that it cannot be trained again. Give "
            "the best.pt of a training on this data."
        )
    return saved_config(known, Path(weights))


def _stated(path: Path) -> dict[str, Any]:
    """What folds are of; {} where the file is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def trained_folds(
    config: ValConfig, training: TrainConfig, spec: DatasetSpec, index: DatasetIndex, run: Path
) -> Iterator[Fold]:
    """Train without one fold after the other; the validation split, by which epochs are chosen, is the dataset's own.

    Args:
        config: how many folds, and on which device.
        training: flags of the training that is repeated.
        spec: the dataset.
        index: of its train.
        run: the folder to write to.

    Raises:
        UserError: there are too few images, `run` has other folds, or a training has failed.
        Interrupted: this process was asked to stop; the training was too.
    """
    folder = (run / "folds").absolute()
    fold_of = folds(spec, index, config.folds)
    parts = [np.flatnonzero(fold_of == number) for number in range(config.folds)]
    repeated = dataclasses.replace(training, **_OWN, epochs=config.epochs or training.epochs)
    state = {"number": config.folds, "data": index.content_hash(), "training": shlex.join(repeated.as_args())}
    before = _stated(folder / _STATE) if (folder / _STATE).is_file() else state
    if before != state:
        others = " and ".join(key for key, value in state.items() if before.get(key) != value)
        raise ConfigError(
            f"{shown(folder)}: it has folds of another {others} than these flags ask for. Give another --name, or "
            "leave --exist-ok out."
        )
    folder.mkdir(exist_ok=True)
    with atomic_write(folder / _STATE) as file:
        file.write(json.dumps(state).encode())
    if not (folder / _DATA).is_dir():
        lists = {f"fold{n + 1}": {"train": np.flatnonzero(fold_of != n).tolist()} for n in range(config.folds)}
        held = [build_index(spec, "val")] if spec.held_out else []
        write_copy(folder / _DATA, spec, [index, *held], {}, lists)
    for number, images in enumerate(parts, 1):
        name = f"fold{number}"
        log.info(f"Fold {number} of {config.folds}: training without {len(images):,} of {len(index):,} images.")
        own: dict[str, Any] = {"device": config.device, "workers": config.workers, "project": str(folder), "name": name}
        _train(dataclasses.replace(repeated, **own, data=str(folder / _DATA / f"{name}.yaml")), run, name)
        yield Fold(images, folder / name / "weights" / "best.pt")


def _train(config: TrainConfig, run: Path, name: str) -> None:
    """One training, to its end."""
    command = [*started_again(config.program), *config.as_args()]
    again = f"Continue with the same command and --project {run.parent} --name {run.name} --exist-ok."
    process = subprocess.Popen(command)
    try:
        code = process.wait()
    except BaseException as error:
        process.terminate()  # it saves a checkpoint
        process.wait()
        if isinstance(error, Interrupted):
            raise Interrupted(f"{error} {again}", error.exit_code - 128) from error
        raise
    if code:
        raise UserError(
            f"--folds: the training of {name} has ended with code {code}; its message is above. It was "
            f"{called(config.program)} {shlex.join(config.as_args())}\n{again}"
        )


def part_of_index(index: DatasetIndex, images: NDArray[np.int64]) -> DatasetIndex:
    """The index of some images, int64 ascending; those of the part count from 0."""
    objects, box_offsets = _rows(index.box_offsets, images)
    paths, path_offsets = _rows(index.path_offsets, images)
    points, segment_offsets = np.zeros(0, np.int64), index.segment_offsets
    if len(segment_offsets):
        points, segment_offsets = _rows(segment_offsets, objects)
    regions, ignored_offsets = np.zeros(0, np.int64), index.ignored_offsets
    if len(ignored_offsets):
        regions, ignored_offsets = _rows(ignored_offsets, images)
    return dataclasses.replace(
        index,
        path_bytes=index.path_bytes[paths],
        path_offsets=path_offsets,
        sizes_hw=index.sizes_hw[images],
        box_offsets=box_offsets,
        classes=index.classes[objects],
        boxes_xyxy=index.boxes_xyxy[objects],
        segment_offsets=segment_offsets,
        segment_points=index.segment_points[points],
        ignored_offsets=ignored_offsets,
        ignored_classes=index.ignored_classes[regions],
        ignored_boxes_xyxy=index.ignored_boxes_xyxy[regions],
        coco_text=np.zeros(0, np.uint8),
        digest=f"{index.digest}-{len(images)}-{images[:1].sum()}",
        stored_hash="",
    )


def _rows(offsets: NDArray[np.int64], chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows of some stretches, and where each of these starts among them."""
    parts = [np.arange(*offsets[one : one + 2].tolist()) for one in chosen.tolist()]
    return np.concatenate([np.zeros(0, np.int64), *parts]), np.cumsum([0, *map(len, parts)])
