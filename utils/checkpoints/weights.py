"""Weights to start from: what their file holds, and which of it fits a model."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tessera.models.detector import DetectionModel
from tessera.utils.checkpoints.foreign.read import read_foreign
from tessera.utils.checkpoints.format import WEIGHTS_KEYS, load_any_checkpoint
from tessera.utils.checkpoints.inert_pickle import Damaged
from tessera.utils.checkpoints.safetensors import SUFFIX, read_safetensors
from tessera.utils.checkpoints.schema import check_detector, check_finite
from tessera.utils.errors import UserError
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.out_of_memory import explain_out_of_memory_of
from tessera.utils.pixels import PixelRule
from tessera.utils.text import first_of, one_line, shown

log = logging.getLogger(__name__)

_USUAL_IMGSZ = 640  # of files that do not say at which size they were trained
# Suffixes of exported files, and what computes them.
EXPORTED = {
    ".onnx": "ONNX Runtime",
    ".xml": "OpenVINO",
    ".torchscript": "torch",
    ".pt2": "torch",
    ".param": "ncnn",
    ".tflite": "LiteRT",
}
_OTHER = "for the weights are of another architecture"
_LEAST_SHARE = 0.05  # of the numbers in a model's layers: what fits by chance is less
_ORDINARY_SHARE = 0.5


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
        family: whose file it is, where not this program's: "YOLOv5", "YOLOX" or "YOLOv9".
        checkpoint: all that best.pt holds, of a checkpoint of this program; None of other files.
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
    family: str = ""
    checkpoint: Mapping[str, Any] | None = None

    @property
    def usual_imgsz(self) -> int:
        """Size in pixels to measure, detect and export at where none is asked for."""
        return self.imgsz or _USUAL_IMGSZ


def load_weights(path: Path) -> Weights:
    """Read the weights of a checkpoint of this program, or of a file of YOLOv5, YOLOX or YOLOv9; nothing in it is run.

    Raises:
        UserError: an exported file; else as of `load_any_checkpoint` and `read_foreign`; or a number in it is none.
    """
    if path.suffix.lower() in EXPORTED:
        raise UserError(
            f"{path}: an exported file; val.py and detect.py take it, but it cannot be trained on or exported again. "
            "Give the .pt that it was exported from, such as runs/train/exp/weights/best.pt."
        )
    with explain_out_of_memory_of(path, Accelerator()):
        weights = _read(path)
    try:
        check_detector(weights.names, weights.imgsz, weights.confidence, weights.class_confidences)
        check_finite(weights.state_dict)
    except Damaged as error:
        raise UserError(f"{path}: damaged: {error}. Take another checkpoint, such as an earlier one.") from error
    return weights


def _read(path: Path) -> Weights:
    if path.suffix.lower() == SUFFIX:
        return Weights(**read_safetensors(path))
    if foreign := read_foreign(path):
        source = f"{path.name} (original {foreign.family})"
        return Weights(foreign.state_dict, foreign.model_yaml, foreign.names, source, family=foreign.family)
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
        checkpoint={key: state[key] for key in WEIGHTS_KEYS},
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
    with explain_out_of_memory_of(given, Accelerator()):
        model = DetectionModel(weights.model_yaml, names=weights.names or None)
    different = differences(model.state_dict(), weights.state_dict, most=2)
    if different:
        of_family = f" of {weights.family}" if weights.family else ""
        raise UserError(
            f"--weights {given}: the weights{of_family} do not fit their architecture: {different}. Use another file, "
            "or train from it, which takes what fits."
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
        UserError: no layer's weights fit, or so few that it is by chance: the architecture is another one.
    """
    patterns = [re.compile(pattern) for pattern in exclude]
    own, offered = (
        {name: tensor for name, tensor in state.items() if not any(p.search(name) for p in patterns)}
        for state in (model_state, checkpoint_state)
    )
    fitting = {k: t for k, t in offered.items() if k in own and t.shape == own[k].shape}
    different = differences(own, offered)
    share, other = share_of_layers(own, fitting), _why_not_all(own, offered) == _OTHER
    if share == 0 or (other and share < _LEAST_SHARE):
        among = f"{share:.1%} of the layers' weights" if share else "no layer's weights"
        raise UserError(
            f"{source}: an architecture that does not fit the weights: {len(fitting)} of {len(model_state)} tensors "
            f"fit, and {among} among them ({different}). Give the --cfg that belongs to the weights, or no --cfg."
        )
    report = f"{len(fitting)} of {len(model_state)} tensors taken"
    if len(own) < len(model_state):
        report += f"; {len(model_state) - len(own)} left out as asked"
    if different:
        report += f"; the rest starts anew, {_why_not_all(own, offered)}: {different}"
    return fitting, report


def share_of_layers(model_state: Mapping[str, Tensor], fitting: Iterable[str]) -> float:
    """The part of the numbers in a model's layers that some of its tensors have, 0 to 1.

    Counters, norms and a head's anchors have the same shape in several sizes of a family: they do not show a fit.

    Args:
        model_state: a state dictionary.
        fitting: names in it.
    """
    numbers = {k: t.numel() for k, t in model_state.items() if k.endswith(".weight") and t.ndim >= 2}
    return sum(numbers.get(name, 0) for name in fitting) / max(1, sum(numbers.values()))


def warn_of_little_in_common(weights: Weights, model_state: Mapping[str, Tensor], fitting: Iterable[str]) -> None:
    """Warn where weights of another architecture start less than half of a model.

    Args:
        weights: that were taken.
        model_state: a state dictionary of the model.
        fitting: names of the tensors that were taken.
    """
    share = share_of_layers(model_state, fitting)
    if share < _ORDINARY_SHARE and _why_not_all(model_state, weights.state_dict) == _OTHER:
        log.warning(
            f"{weights.source}: only {share:.0%} of the model's layers start from these weights, for they are of "
            "another architecture. Give the --cfg that belongs to them, or no --cfg, where that is not meant."
        )


def _why_not_all(own: Mapping[str, Tensor], offered: Mapping[str, Tensor]) -> str:
    """What is other in a checkpoint that fits a model in part: the number of classes, the head, or more than that."""
    fitting = {name for name in own if name in offered and own[name].shape == offered[name].shape}
    unfit = (own.keys() | offered.keys()) - fitting
    head = max((name for name in own if name.startswith("model.")), key=_layer, default="")
    if not head or any(_layer(name) not in (_layer(head), -1) for name in unfit):
        return _OTHER
    return "as with other classes" if own.keys() == offered.keys() else "for the weights have another kind of head"


def _layer(name: str) -> int:
    """The number of the layer that a tensor such as "model.24.m.0.weight" belongs to; -1 where it belongs to none."""
    found = re.match(r"model\.(\d+)\.", name)
    return int(found[1]) if found else -1


def warn_of_moved_classes(weights: Weights, names: Sequence[str]) -> None:
    """Warn where a model for `names` starts with what the weights have learned of others of them, and say of which."""
    moved = moved_classes(weights.names, names) if len(weights.names) == len(names) else ""
    if moved:
        log.warning(
            f"{weights.source}: the data has the classes in another order ({moved}): what was learned of one class is "
            "taken for another. Put them in the checkpoint's order where that is not meant."
        )
    elif renamed := renamed_classes(weights.names, names):
        log.info(
            f"{weights.source}: the data has as many classes, but others ({renamed}): what was learned of one is the "
            "start of the other."
        )


def renamed_classes(before: Sequence[str], now: Sequence[str]) -> str:
    """Classes of one number and another name, such as "2 is 'car' in the checkpoint and 'cow' in the data".

    "" where that are less than half of them, where the numbers of classes differ, or where names are but numbers.
    """
    if len(before) != len(now) or list(before) == [str(number) for number in range(len(before))]:
        return ""
    pairs = enumerate(zip(before, now, strict=True))
    renamed = [
        f"{number} is {shown(old)} in the checkpoint and {shown(new)} in the data"
        for number, (old, new) in pairs
        if old.strip().casefold() != new.strip().casefold()
    ]
    return first_of(renamed, 3) if 2 * len(renamed) > len(now) else ""


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


def differences(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], most: int = 4) -> str:
    """Tensors of a model that a checkpoint lacks or has in another shape, and surplus ones; "" where there are none."""
    lines = [
        f"{name} is {tuple(tensor.shape)}, in the checkpoint {tuple(found[name].shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    lines += [f"{name} is not in the checkpoint" for name in expected if name not in found]
    lines += [
        f"{one_line(name, 60)} of the checkpoint has no place in the model" for name in found if name not in expected
    ]
    return first_of(lines, most, "; ")
