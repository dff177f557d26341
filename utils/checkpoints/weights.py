"""Files of `--weights`: their lookup or download, loading, and a detector with their weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tessera.models.detector import DetectionModel
from tessera.models.heads.head import Head
from tessera.models.model_yaml import MODELS_DIR, register_head
from tessera.utils.bit_depth import PixelRule
from tessera.utils.checkpoints.archive import DamagedFile
from tessera.utils.checkpoints.format import (
    WEIGHTS_KEYS,
    check_detector,
    check_finite,
    checked_checkpoint,
    is_own,
    read_content,
)
from tessera.utils.config import OWN_WEIGHTS
from tessera.utils.environment import cache_dir
from tessera.utils.errors import ConfigError, UserError, did_you_mean
from tessera.utils.extensions import extension
from tessera.utils.files import absolute_path, reachable_path, special_file_kind
from tessera.utils.flags.program import called
from tessera.utils.image_size import ImageSize, image_size
from tessera.utils.machine.accelerator import Accelerator, explain_out_of_memory_loading
from tessera.utils.text import first_of, one_line, plural
from tessera.utils.user_parts import load_part

IMAGENET = "imagenet"  # value of --weights: the backbone of a classifier
# Suffixes of exported files, and their runtimes.
EXPORTED = {".onnx": "ONNX Runtime", ".xml": "OpenVINO", ".torchscript": "torch", ".param": "ncnn", ".tflite": "LiteRT"}
_USUAL_IMGSZ = 640  # default for files without a training size


class Weights(NamedTuple):
    """Weights and their description; fields have a default if the file lacks them."""

    state_dict: dict[str, Tensor]  # float32; the EMA's
    model_yaml: dict[str, Any]
    names: tuple[str, ...]  # classes by index
    source: str  # for the log: "best.pt (after 12 epochs)"
    data: str = ""  # dataset YAML of the training, as given
    imgsz: ImageSize | None = None  # training size in pixels
    confidence: float | None = None  # with the best mean F1 in validation
    class_confidences: tuple[float, ...] = ()  # with the best F1 of each class
    pixels: PixelRule | None = None  # conversion of images with more than 8 bits
    family: str = ""  # other program: "YOLOv5", "YOLOX", "YOLOv9" or "EfficientNet-Lite"
    checkpoint: Mapping[str, Any] | None = None  # `WEIGHTS_KEYS` of a checkpoint of this program
    is_backbone: bool = False  # of a classifier, without a detector's neck and head

    @property
    def default_imgsz(self) -> ImageSize:
        """Default image size in pixels for validation, detection and export."""
        return self.imgsz or _USUAL_IMGSZ


def own_head(name: str) -> type[Head] | None:
    """Return the head of `--head`, registered, so that checkpoints that end in it load; None without the flag.

    Raises:
        ConfigError: there is no such head.
        UserError: its module cannot be imported.
    """
    return register_head(load_part(name, "--head")) if name else None


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
    if path.suffix.lower() == ".safetensors":
        weights: Weights = extension("safetensors files").read_safetensors(path)
        return weights
    content, length = read_content(path)
    if not is_own(content):
        foreign: Weights | None = extension("weights of other programs").import_foreign(path, content)
        if foreign is not None:
            return foreign
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
        imgsz=None if state["imgsz"] is None else image_size(state["imgsz"]),
        confidence=thresholds["confidence"],
        class_confidences=tuple(thresholds["class_confidences"]),
        pixels=PixelRule.from_plain(state["pixels"], f"{path}: pixels"),
        checkpoint={key: state[key] for key in WEIGHTS_KEYS},
    )


def model_of_weights(weights: Weights, given: str) -> DetectionModel:
    """Build the detector that a file, called `given` in errors, describes, with its weights.

    Raises:
        UserError: the weights do not fit the architecture.
        ConfigError: the architecture is invalid.
    """
    try:
        with explain_out_of_memory_loading(given, Accelerator()):
            model = DetectionModel(weights.model_yaml, names=weights.names or None)
    except ConfigError as error:
        raise ConfigError(f"--weights {given}: {error}") from error
    different = tensor_differences(model.state_dict(), weights.state_dict, most=2)
    if different:
        of_family = f" of {weights.family}" if weights.family else ""
        raise UserError(
            f"--weights {given}: the weights{of_family} do not fit their architecture: {different}. Use another file, "
            "or train from it, which loads the tensors that fit."
        )
    model.load_state_dict(weights.state_dict)
    return model


def tensor_differences(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], most: int = 4) -> str:
    """Describe missing, reshaped and surplus tensors of a checkpoint; "" if there are none."""
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


# ------------------------------------------------------------------------------------------ lookup and download


def resolve_weights(name: str) -> Path:
    """Return the path of the file that `--weights` names.

    The bare name of a published file, such as "yolox_s.pth" or "yolox_s", is searched in the working directory, then in
    the cache, and is downloaded otherwise. "tessera-n" comes with the program.

    Raises:
        UserError: there is no such file, the download fails, or the file is not the published one.
    """
    if not name:
        raise UserError("--weights is empty, expected a checkpoint, such as runs/train/exp/weights/best.pt.")
    given = reachable_path(name, "--weights")
    if given.is_file():
        return given
    bare = given.name == name
    own = MODELS_DIR / f"{name.removesuffix('.pt')}.pt"
    if bare and own.is_file():
        return own
    if bare and not given.exists() and (published := extension("published weights").published_file(name)):
        return Path(published)
    cached = cache_dir() / "weights" / given.name
    if bare and cached.is_file():
        return cached
    if kind := special_file_kind(given):
        best = reachable_path(given / "weights" / "best.pt", "--weights")
        none = f" There is no {best} either." if given.is_dir() else ""
        hint = f" Its best checkpoint is --weights {best}." if best.is_file() else none
        raise UserError(f"--weights {name}: found {kind}, expected a checkpoint file.{hint}")
    raise _missing(name, given, f"{absolute_path(given)}" + (f" and {cached}" if bare else ""))


def resolve_run(name: str) -> Path:
    """Return the best checkpoint of a run directory, else the result of `resolve_weights`."""
    best = reachable_path(Path(name) / "weights" / "best.pt", "--weights")
    return best if name and best.is_file() else resolve_weights(name)


def _missing(name: str, given: Path, tried: str) -> UserError:
    if name == IMAGENET:
        return UserError(
            f"--weights {name}: the backbone of a classifier, which only {called('train.py')} accepts. Give a "
            "detector, such as runs/train/exp/weights/best.pt."
        )
    bare, model = given.name == name, given.stem if given.suffix in (".pt", ".pth", ".yaml") else given.name
    published = extension("published weights")
    if (
        bare
        and not published.published_weights(model)
        and (MODELS_DIR / f"{model}.yaml").is_file()
        and model != OWN_WEIGHTS
    ):
        return UserError(
            f"--weights {name}: no such file; tried {tried}. No weights of {model} are published. Train it from "
            f"scratch with --cfg {model}.yaml and without --weights, or give a checkpoint of a run."
        )
    beside = [path.name for path in given.parent.glob("*.pt")] if given.parent.is_dir() else []
    beside.append(OWN_WEIGHTS)
    hint = published.suggestion(name, beside) if bare else did_you_mean(given.name, beside)
    return UserError(
        f"--weights {name}: no such file; tried {tried}.{hint} Expected a checkpoint, or the name of a published file "
        "(--list-weights)."
    )
