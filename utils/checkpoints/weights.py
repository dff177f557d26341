"""Loading of weights (checkpoints, other programs' files, safetensors), models of them, safetensors writing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tessera.models.detector import DetectionModel
from tessera.utils.bit_depth import PixelRule
from tessera.utils.checkpoints.foreign.read import import_foreign
from tessera.utils.checkpoints.format import WEIGHTS_KEYS, checked_checkpoint, read_content
from tessera.utils.checkpoints.restricted_unpickler import DamagedFile
from tessera.utils.checkpoints.schema import check_detector, check_finite
from tessera.utils.checkpoints.transfer import tensor_differences
from tessera.utils.errors import UserError
from tessera.utils.files import atomic_write
from tessera.utils.flags.program import called
from tessera.utils.machine.accelerator import Accelerator, explain_out_of_memory_loading
from tessera.utils.machine.optional_packages import import_extra
from tessera.utils.text import first_line, plural, shown, strict_json

_SAFETENSORS, _SAFETENSORS_FORMAT = ".safetensors", "tessera-weights 1"
_USUAL_IMGSZ = 640  # default for files without a training size
# Suffixes of exported files, and their runtimes.
EXPORTED = {".onnx": "ONNX Runtime", ".xml": "OpenVINO", ".torchscript": "torch", ".param": "ncnn", ".tflite": "LiteRT"}


class Weights(NamedTuple):
    """Weights and their description; fields have a default if the file lacks them."""

    state_dict: dict[str, Tensor]  # float32; the EMA's
    model_yaml: dict[str, Any]
    names: tuple[str, ...]  # classes by index
    source: str  # for the log: "best.pt (after 12 epochs)"
    data: str = ""  # dataset YAML of the training, as given
    imgsz: int | None = None  # training size in pixels
    confidence: float | None = None  # with the best mean F1 in validation
    class_confidences: tuple[float, ...] = ()  # with the best F1 of each class
    pixels: PixelRule | None = None  # conversion of images with more than 8 bits
    family: str = ""  # other program: "YOLOv5", "YOLOX", "YOLOv9" or "EfficientNet-Lite"
    checkpoint: Mapping[str, Any] | None = None  # `WEIGHTS_KEYS` of a checkpoint of this program

    @property
    def default_imgsz(self) -> int:
        """Default image size in pixels for validation, detection and export."""
        return self.imgsz or _USUAL_IMGSZ


def load_weights(path: Path) -> Weights:
    """Load a checkpoint of this program, a safetensors file, or a file of YOLOv5, YOLOX or YOLOv9. No code in it runs.

    Raises:
        UserError: an exported file, an unreadable or unsupported file, or values that are not finite.
    """
    if path.suffix.lower() in EXPORTED:
        raise UserError(
            f"{path}: an exported file, which only {called('val.py')} and {called('detect.py')} accept. Give the .pt "
            "that it was exported from, such as runs/train/exp/weights/best.pt."
        )
    with explain_out_of_memory_loading(path, Accelerator()):
        weights = _read(path)
    try:
        check_detector(weights.names, weights.imgsz, weights.confidence, weights.class_confidences)
        check_finite(weights.state_dict)
    except DamagedFile as error:
        raise UserError(f"{path}: damaged: {error}. Use another checkpoint, such as an earlier one.") from error
    return weights


def _read(path: Path) -> Weights:
    if path.suffix.lower() == _SAFETENSORS:
        return _read_safetensors(path)
    content, length = read_content(path)
    if foreign := import_foreign(path, content):
        family, imported = foreign
        source = f"{path.name} (original {family})"
        return Weights(imported.state_dict, imported.model_yaml, imported.names, source, family=family)
    state = checked_checkpoint(path, content, length)
    epoch = state["epoch"]
    done = f"in epoch {epoch}" if state.get("step_in_epoch") else f"after {plural(epoch, 'epoch')}"
    data = state["config"].get("data")
    thresholds = state["thresholds"] or {"confidence": None, "class_confidences": ()}
    return Weights(
        state["ema"],
        state["model_yaml"],
        tuple(state["names"]),
        source=f"{path.name} ({done})",
        data=data if isinstance(data, str) else "",
        imgsz=state["imgsz"],
        confidence=thresholds["confidence"],
        class_confidences=tuple(thresholds["class_confidences"]),
        pixels=PixelRule.from_plain(state["pixels"], f"{path}: pixels"),
        checkpoint={key: state[key] for key in WEIGHTS_KEYS},
    )


def _read_safetensors(path: Path) -> Weights:
    module = import_extra("safetensors", "safetensors", str(path))
    try:
        with module.safe_open(path, "pt") as file:
            found = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (module.SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: not a valid safetensors file ({first_line(error)}). Copy or export it again."
        ) from error
    if found.get("format") != _SAFETENSORS_FORMAT:
        raise UserError(
            f"{path}: found format {shown(found.get('format'))}, expected {_SAFETENSORS_FORMAT!r}. A file of another "
            "program does not describe its model. Give an exported file, or the checkpoint."
        )
    try:
        imgsz, confidence = json.loads(found["trained_imgsz"]), json.loads(found["confidence"])
        return Weights(
            {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()},
            model_yaml=dict(json.loads(found["model_yaml"])),
            names=tuple(json.loads(found["names"])),
            source=path.name,
            data=found["data"],
            imgsz=None if imgsz is None else int(imgsz),
            confidence=None if confidence is None else float(confidence),
            class_confidences=tuple(float(one) for one in json.loads(found["class_confidences"])),
            pixels=PixelRule.from_plain(json.loads(found["pixels"]), f"{path}: pixels"),
        )
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{path}: its header is damaged ({problem}). Export it again.") from error


def model_of_weights(weights: Weights, given: str) -> DetectionModel:
    """Build the detector that a file, called `given` in errors, describes, with its weights.

    Raises:
        UserError: the weights do not fit the architecture.
        ConfigError: the architecture is invalid.
    """
    with explain_out_of_memory_loading(given, Accelerator()):
        model = DetectionModel(weights.model_yaml, names=weights.names or None)
    different = tensor_differences(model.state_dict(), weights.state_dict, most=2)
    if different:
        of_family = f" of {weights.family}" if weights.family else ""
        raise UserError(
            f"--weights {given}: the weights{of_family} do not fit their architecture: {different}. Use another file, "
            "or train from it, which loads the tensors that fit."
        )
    model.load_state_dict(weights.state_dict)
    return model


def save_safetensors(path: Path, weights: Weights, described: Mapping[str, str], *, half: bool = False) -> None:
    """Write weights as safetensors atomically, floats as float16 if `half`; `described` adds strings to the header.

    Raises:
        UserError: the package is missing, or the file cannot be written.
    """
    module = import_extra("safetensors.torch", "safetensors", str(path))
    tensors = {
        name: (tensor.half() if half and tensor.is_floating_point() else tensor).detach().cpu().contiguous().clone()
        for name, tensor in weights.state_dict.items()
    }
    own = {
        "format": _SAFETENSORS_FORMAT,
        "model_yaml": strict_json(weights.model_yaml),
        "names": strict_json(list(weights.names)),
        "data": weights.data,
        "trained_imgsz": strict_json(weights.imgsz),
        "confidence": strict_json(weights.confidence),
        "class_confidences": strict_json(list(weights.class_confidences)),
        "pixels": strict_json(None if weights.pixels is None else weights.pixels.as_dict()),
    }
    try:
        with atomic_write(path) as file:
            file.write(module.save(tensors, {**described, **own}))
    except OSError as error:
        raise UserError(
            f"{path}: cannot write the export: {error.strerror or error}. Free space, or make the directory writable."
        ) from error
