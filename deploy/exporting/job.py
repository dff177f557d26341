"""The export job: checkpoint, flags, sizes, calibration images and metadata shared by all formats."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.data.labels.classes import SINGLE_CLASS
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.decode import UndecodableImage, read_image
from tessera.data.source.index import build_index
from tessera.deploy.exporting.flags import ExportConfig
from tessera.deploy.exporting.quantisation import SENSITIVITY_IMAGES, sensitive_layers
from tessera.deploy.foreign.published import licence_of, published_weights
from tessera.deploy.runtime.exported import BARE, WHOLE
from tessera.deploy.runtime.pipeline import letterbox_image, network_input
from tessera.models.detector import DetectionModel, check_imgsz
from tessera.models.layers.blocks import Conv
from tessera.utils.bit_depth import Pixels
from tessera.utils.checkpoints.weights import Weights, load_weights, model_of_weights, resolve_weights
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.evaluation.evaluation_data import model_classes
from tessera.utils.files import sha256, user_path
from tessera.utils.flags.options import parsed_confidence
from tessera.utils.flags.program import program_version
from tessera.utils.image_size import ImageSize, image_size, size_hw_of
from tessera.utils.text import one_line, strict_json
from tessera.utils.thresholds import class_thresholds, detection_threshold
from tessera.utils.types import DatasetIndex

CALIBRATION = 128  # training images, spread evenly
VARIANTS = ("raw", "half", "int8", "end2end", "batched")  # flags that not every format supports

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportJob:
    """A checkpoint to export."""

    path: Path
    sha256: str  # of the file at `path`
    model: DetectionModel  # unfused, in training mode on the CPU; its head is reduced to inference
    weights: Weights  # the other content of the checkpoint
    config: ExportConfig
    imgsz: ImageSize  # that images are resized to, multiples of the stride
    size_hw: tuple[int, int] | None  # fixed height and width of the bare network; None = any
    conf: float  # recommended confidence, written to the metadata

    @classmethod
    def read(cls, config: ExportConfig) -> ExportJob:
        """Load `--weights` and derive sizes and thresholds; a UserError where one does not fit."""
        path = resolve_weights(config.weights)
        weights = load_weights(path)
        model = model_of_weights(weights, str(path))
        if model.channels != 3:
            raise UserError(f"--weights {path}: reads images of {model.channels} channels, expected 3: images are RGB.")
        model.head.strip_for_inference(end2end=config.end2end)
        size_hw = _fixed_size(config, model)
        imgsz = image_size(size_hw) if size_hw else check_imgsz(config.imgsz or weights.default_imgsz, model.stride)
        best, asked = detection_threshold(weights.confidence), parsed_confidence(config.conf_thres)
        if asked is None and weights.confidence not in (None, best):
            log.warning(
                f"--conf-thres: the best F1 of {path} is at {weights.confidence:.3g}, too low to detect with; the "
                f"default of the export is {best:g}."
            )
        conf = best if asked is None else asked
        job = cls(path, sha256(path), model, weights, config, imgsz, size_hw, conf)
        if config.int8:
            _ = job.training  # raises before any work
        return job

    @property
    def folder(self) -> Path:
        """Output folder: `--output`, else that of the file as given: for a bare name the working directory."""
        config = self.config
        return user_path(config.output, "--output") if config.output else user_path(config.weights, "--weights").parent

    def file(self, suffix: str) -> Path:
        """Return the output path for a suffix; variants are part of the name."""
        words = [self.path.stem, *(word for word in VARIANTS if getattr(self.config, word))]
        if self.size_hw:
            words.append("{}x{}".format(*self.size_hw))
        return self.folder / ("-".join(words) + suffix)

    def images(self, split: str) -> tuple[DatasetIndex | None, tuple[int, ...]]:
        """Return a split of `--data`, or of the training dataset where that exists here, and `model_classes` of val.

        Nothing is downloaded without `--data`. A UserError where that is invalid or has none of the model's classes.
        """
        given, single_cls = self.config.data, self.weights.names == (SINGLE_CLASS,)
        if not (given or self.weights.data):
            return None, ()
        try:
            spec = load_spec(given or self.weights.data, obtain=bool(given))
            index, source = build_index(spec, split, single_cls=single_cls), f"--weights {self.path}"
            return index, model_classes(self.model.names, spec, source, single_cls=single_cls) if split == "val" else ()
        except UserError as error:
            if given:
                raise
            log.warning(f"{error} The weights were trained on it; give another dataset with --data.")
            return None, ()

    @cached_property
    def training(self) -> DatasetIndex:
        """Images for calibration; a UserError where they are missing."""
        index, _ = self.images("train")
        if index is None:
            kind, where = (UserError, "here") if self.weights.data else (ConfigError, "known")
            raise kind(
                f"--int8: quantisation is calibrated on training images, but the dataset that {self.path.name} was "
                f"trained on is not {where}. Give its YAML with --data, such as --data coco128.yaml."
            )
        return index

    def raw_calibration_images(self, count: int = CALIBRATION) -> Iterator[Pixels]:
        """Yield at most `count` training images, uint8 (H, W, 3) RGB."""
        return decoded_images(self.training, np.arange(len(self.training)), count)

    def calibration_images(self, count: int = CALIBRATION) -> Iterator[Tensor]:
        """Yield calibration images as network input, float32 (1, 3, h, w)."""
        for pixels in self.raw_calibration_images(count):
            canvas, _ = letterbox_image(pixels, self.imgsz, self.model.stride, self.size_hw)
            yield network_input(canvas, torch.device("cpu")).contiguous()

    @cached_property
    def float_layers(self) -> tuple[int, ...]:
        """Layers that an 8-bit file computes in float32, as the model YAML counts them."""
        layers = sensitive_layers(self.model, self.calibration_images(SENSITIVITY_IMAGES))
        log.info(f"--int8: layers in float32: {', '.join(map(str, layers))}")
        return layers

    @property
    def convolution_weights(self) -> frozenset[str]:
        """Names in the graph of all convolution weights but those of the prediction layers.

        Prediction layers write logits of boxes and classes, whose ranges differ: in 8 bits the scores would vanish.
        """
        convolutions = (name for name, module in self.model.named_modules() if isinstance(module, Conv))
        return frozenset(f"model.{name}.conv.weight" for name in convolutions)

    @property
    def quantized_weights(self) -> frozenset[str]:
        """Names of the weights that are quantised; a UserError where there are none."""
        in_float = tuple(f"model.model.{layer}." for layer in self.float_layers)
        weights = frozenset(name for name in self.convolution_weights if not name.startswith(in_float))
        if not weights:
            raise UserError(
                f"--int8: {self.weights.source}: 8 bits change the scores too much in every layer. Export without "
                "--int8, or train longer."
            )
        return weights


def decoded_images(index: DatasetIndex, order: NDArray[np.integer[Any]], count: int) -> Iterator[Pixels]:
    """Yield at most `count` images, uint8 (H, W, 3) RGB, spread evenly over the numbers in `order`."""
    for place in np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)).tolist():
        with suppress(UndecodableImage):  # `--check-data` reports it
            yield read_image(index.path(int(order[place])), rule=index.pixels)


def _fixed_size(config: ExportConfig, model: DetectionModel) -> tuple[int, int] | None:
    if not config.raw or not config.imgsz:
        return None
    height, width = size_hw_of(config.imgsz)
    if height % model.stride or width % model.stride:
        near = [-(-side // model.stride) * model.stride for side in (height, width)]
        raise ConfigError(
            f"--imgsz {height} {width}: expected multiples of {model.stride}, the stride of {model.name}, such as "
            f"{near[0]} {near[1]}."
        )
    return height, width


_GRAPH_LICENSE = "Apache-2.0 (what Tessera adds)"


def describe(job: ExportJob, *, whole: bool) -> dict[str, str]:
    """Return the metadata of a file, flat strings, the same in every format; others than strings are JSON.

    `whole`: a detector with pre- and postprocessing, else the bare network.
    """
    weights, state = job.weights, job.weights.checkpoint or {}
    class_confs = class_thresholds(weights.class_confidences, detection_threshold(weights.confidence))
    values: dict[str, Any] = {
        "names": list(job.model.names),
        "format": WHOLE if whole else BARE,
        "color": "RGB",
        "imgsz": job.imgsz,  # that images are resized to: long side, or height and width
        "stride": job.model.stride,  # of which their padded sides are multiples
        "size_hw": None if whole else job.size_hw,  # of a bare network with a fixed size
        "batched": whole and job.config.batched,  # takes a batch of images of one size
        "float_layers": job.float_layers if job.config.int8 else None,
        "end2end": not job.model.head.needs_nms,
        "conf": job.conf,  # recommended thresholds
        "iou": job.config.iou_thres,
        "max_det": job.config.max_det,
        "conf_per_class": list(class_confs) or None,  # with the best F1 of each class
        "metrics": state.get("metrics"),  # of the weights in a validation
        "pixels": state.get("pixels"),  # the conversion of images with more than 8 bits
        "weights_sha256": job.sha256,
        "data": weights.data,
        "data_hash": state.get("dataset_hash", ""),  # of the training images
        **program_version(),  # of the exporting program
        "torch_version": torch.__version__,
        "license": job.config.license or f"{_GRAPH_LICENSE}; {_of_weights(weights.family, state)}",
    }
    return {key: value if isinstance(value, str) else strict_json(value) for key, value in values.items()}


def _of_weights(family: str, state: Mapping[str, Any]) -> str:
    """Return what is known about the licence of the weights."""
    if family:
        return f"weights: a file of {_published_by(family)}"
    text, given = "weights: as their trainer says", state.get("config", {}).get("weights")  # a small file has no flags
    if not given or not isinstance(given, str):
        return text
    name = Path(given).name
    of = f", the name of a file of {_published_by(known.family)}" if (known := published_weights(name)) else ""
    return f"{text}; from {one_line(name, 80)}{of}"


def _published_by(family: str) -> str:
    return f"{family} (published weights of {family}: {licence_of(family)}; NOTICE goes with them)"
