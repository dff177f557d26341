"""Weights to start from: the file that `--weights` means, what it holds, and which of it fits a model."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from data.source.download import fetch
from models.description import MODELS_DIR
from models.detector import DetectionModel
from utils.checkpoints.format import load_any_checkpoint
from utils.checkpoints.legacy import is_legacy, load_legacy
from utils.checkpoints.safetensors import SUFFIX, read_safetensors
from utils.environment import cache_dir
from utils.errors import UserError, did_you_mean
from utils.files import special_kind
from utils.pixels import PixelRule
from utils.text import first_of, shown

log = logging.getLogger(__name__)

OFFICIAL_NAMES = tuple(f"yolov5{size}{p6}.pt" for p6 in ("", "6") for size in "nsmlx")
OFFICIAL_URL = "https://github.com/ultralytics/yolov5/releases/download/v7.0/{name}"


class Weights(NamedTuple):
    """Weights to start from, and what else their file says.

    Attributes:
        state_dict: float32 tensors by name; the EMA's.
        model_yaml: the architecture, plain.
        names: class names by index; () where an original file has none.
        source: where they come from, for the log: "best.pt (after 12 epochs)".
        data: the dataset YAML that they were trained on, as it was given; "" where the file does not say.
        imgsz: size in pixels that they were trained at; None where the file does not say.
        confidence: where the mean F1 of their validation is best; None where the file does not say.
        class_confidences: where the F1 of each class is best; () where the file does not say.
        pixels: how levels of more than 8 bits became 8 in training.
    """

    state_dict: dict[str, Tensor]
    model_yaml: dict[str, Any]
    names: tuple[str, ...]
    source: str
    data: str = ""
    imgsz: int | None = None
    confidence: float | None = None
    class_confidences: tuple[float, ...] = ()
    pixels: PixelRule | None = None


def load_weights(path: Path) -> Weights:
    """Read the weights of a checkpoint of this program or of an original YOLOv5 file; nothing in it is run.

    Raises:
        UserError: as of `load_any_checkpoint` and `load_legacy`.
    """
    if path.suffix.lower() == SUFFIX:
        return Weights(**read_safetensors(path))
    if is_legacy(path):
        original = load_legacy(path)
        described = {"name": path.stem, **original.model_yaml}
        return Weights(original.state_dict, described, original.names, f"{path.name} (original YOLOv5)")
    state = load_any_checkpoint(path)
    epoch = state["epoch"]
    done = f"in epoch {epoch}" if state.get("step_in_epoch") else f"after {epoch} epoch{'s' * (epoch != 1)}"
    source = f"{path.name} ({done})"
    thresholds = state["thresholds"] or {"confidence": None, "class_confidences": ()}
    return Weights(
        state["ema"],
        state["model_yaml"],
        tuple(state["names"]),
        source,
        _data(state),
        state["imgsz"],
        thresholds["confidence"],
        tuple(thresholds["class_confidences"]),
        PixelRule.from_plain(state["pixels"], f"{path}: pixels"),
    )


def _data(state: Mapping[str, Any]) -> str:
    data = state["config"].get("data")
    return data if isinstance(data, str) else ""


def model_of_weights(weights: Weights, given: str) -> DetectionModel:
    """The detector that a file describes, with its weights.

    Args:
        weights: from `load_weights`.
        given: names the file in the error.

    Raises:
        UserError: the weights do not fit the architecture.
        ConfigError: the architecture is wrong.
    """
    model = DetectionModel(weights.model_yaml, names=weights.names or None)
    different = differences(model.state_dict(), weights.state_dict)
    if different:
        raise UserError(
            f"--weights {given}: the weights do not fit the architecture that the file names: {different}. Use "
            f"another file, or train from it with --cfg, which takes what fits."
        )
    model.load_state_dict(weights.state_dict)
    return model


def intersect_weights(
    model_state: Mapping[str, Tensor],
    checkpoint_state: Mapping[str, Tensor],
    *,
    source: str = "the checkpoint",
    exclude: Iterable[str] = (),
) -> tuple[dict[str, Tensor], str]:
    """The tensors of a checkpoint that fit a model by name and shape.

    Another number of classes changes the head's convolutions: the ordinary case of fine-tuning, reported and no error.

    Args:
        model_state, checkpoint_state: state dictionaries.
        source: names the checkpoint in the error.
        exclude: regular expressions; a tensor whose name contains a match stays as the model has it.

    Returns:
        The fitting tensors, for `load_state_dict(…, strict=False)`, and a report in one line.

    Raises:
        UserError: no layer's weights fit: the architecture is another one.
    """
    patterns = [re.compile(pattern) for pattern in exclude]
    own, offered = (
        {name: tensor for name, tensor in state.items() if not any(p.search(name) for p in patterns)}
        for state in (model_state, checkpoint_state)
    )
    fitting = {k: t for k, t in offered.items() if k in own and t.shape == own[k].shape}
    different = differences(own, offered)
    # Counters and a head's anchors have the same shape in every size of a family: they do not show a fit.
    if not any(name.endswith(".weight") and tensor.ndim >= 2 for name, tensor in fitting.items()):
        raise UserError(
            f"{source}: an architecture that does not fit the weights: {len(fitting)} of {len(model_state)} tensors "
            f"fit, and no layer's weights among them ({different}). Give the --cfg that belongs to the "
            f"weights, or no --cfg."
        )
    report = f"{len(fitting)} of {len(model_state)} tensors taken"
    if len(own) < len(model_state):
        report += f"; {len(model_state) - len(own)} left out as asked"
    if different:
        report += f"; the rest starts anew, {_why_not_all(own, offered)}: {different}"
    return fitting, report


def _why_not_all(own: Mapping[str, Tensor], offered: Mapping[str, Tensor]) -> str:
    """What is other in a checkpoint that fits a model in part: the number of classes, the head, or more than that."""
    fitting = {name for name in own if name in offered and own[name].shape == offered[name].shape}
    unfit = (own.keys() | offered.keys()) - fitting
    head = max((name for name in own if name.startswith("model.")), key=_layer, default="")
    if not head or any(_layer(name) not in (_layer(head), -1) for name in unfit):
        return "for the weights are of another architecture"
    return "as with other classes" if own.keys() == offered.keys() else "for the weights have another kind of head"


def _layer(name: str) -> int:
    """The number of the layer that a tensor such as "model.24.m.0.weight" belongs to; -1 where it belongs to none."""
    found = re.match(r"model\.(\d+)\.", name)
    return int(found[1]) if found else -1


def warn_of_moved_classes(weights: Weights, names: Sequence[str]) -> None:
    """Warn where a model for `names` starts with what the weights have learned of other classes."""
    moved = moved_classes(weights.names, names) if len(weights.names) == len(names) else ""
    if moved:
        log.warning(
            f"{weights.source}: the data has the classes in another order ({moved}): what was learned of one class is "
            "taken for another. Put them in the checkpoint's order where that is not meant."
        )


def moved_classes(before: Sequence[str], now: Sequence[str]) -> str:
    """Classes that two lists of names give another number, such as "cat is 0 in the checkpoint and 1 in the data".

    A class that one of them names differently has not moved. "" where there are none.
    """
    places = {name.strip().casefold(): number for number, name in enumerate(now)}
    moved = [
        f"{shown(name)} is {number} in the checkpoint and {place} in the data"
        for number, name in enumerate(before)
        if (place := places.get(name.strip().casefold(), number)) != number
    ]
    return first_of(moved, 3)


def differences(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Tensors of a model that a checkpoint lacks or has in another shape, and surplus ones; "" where there are none."""
    lines = [
        f"{name} is {tuple(tensor.shape)}, in the checkpoint {tuple(found[name].shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    lines += [f"{name} is not in the checkpoint" for name in expected if name not in found]
    lines += [f"{name} of the checkpoint has no place in the model" for name in found if name not in expected]
    return first_of(lines, 4, "; ")


def resolve_weights(name: str, *, progress: bool = True) -> Path:
    """Find the file that `--weights` means; download an official one that is not there.

    Args:
        name: a path, or the bare name of an official YOLOv5 checkpoint such as "yolov5s.pt" or "yolov5s", which is
            looked for in the working directory and in the cache folder, and else downloaded to the latter.
        progress: show a bar while downloading.

    Raises:
        UserError: there is no such file; with the places that were tried.
    """
    if not name:
        raise UserError("--weights is empty, expected a checkpoint, such as runs/train/exp/weights/best.pt.")
    if f"{name}.pt" in OFFICIAL_NAMES and not Path(name).exists():
        name += ".pt"
    given = Path(name).expanduser()
    cached = cache_dir() / "weights" / given.name
    bare = given.name == name
    for candidate in (given, cached) if bare else (given,):
        if candidate.is_file():
            return candidate
    if bare and name in OFFICIAL_NAMES:
        return fetch(OFFICIAL_URL.format(name=name), cached, progress=progress)
    if kind := special_kind(given):
        best = given / "weights" / "best.pt"
        hint = f" Its best one is --weights {best}." if best.is_file() else ""
        raise UserError(f"--weights {name}: found {kind}, expected a checkpoint file.{hint}")
    tried = f"{given.absolute()}" + (f" and {cached}" if bare else "")
    own = f"{given.stem if given.suffix in ('.pt', '.yaml') else given.name}.yaml"
    if bare and f"{given.stem}.pt" not in OFFICIAL_NAMES and (MODELS_DIR / own).is_file():
        raise UserError(
            f"--weights {name}: no such file; tried {tried}. No weights of {own.removesuffix('.yaml')} are published. "
            f"Train it from scratch, without --weights: --cfg {own}; or give a checkpoint of a run."
        )
    beside = (path.name for path in given.parent.glob("*.pt")) if given.parent.is_dir() else ()
    hint = did_you_mean(given.name, [*beside, *(OFFICIAL_NAMES if bare else ())])
    raise UserError(
        f"--weights {name}: no such file; tried {tried}.{hint} Expected a checkpoint, or one of the official names "
        f"{', '.join(OFFICIAL_NAMES)}."
    )
